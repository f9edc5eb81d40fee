//! The loss curve as a small plot of braille dots.

use textplots::{
    AxisBuilder, Chart, LabelBuilder, LabelFormat, LineStyle, Plot, Shape, TickDisplay, TickDisplayBuilder,
};

/// Dots across and down; a character holds 2 x 4.
const WIDTH: u32 = 140;
const HEIGHT: u32 = 48;
/// Dots of a level line.
const LEVEL_DOTS: u16 = 35;

/// Draws training losses as a line, validation losses as a second one, and the unigram model's as a level. Points are
/// (steps done, loss in nats). Empty where there are fewer than two training points to draw.
pub(crate) fn loss(training: &[(f32, f32)], validation: &[(f32, f32)], unigram: f32) -> String {
    let (Some(first), Some(last)) = (training.first(), training.last()) else { return String::new() };
    if training.len() < 2 {
        return String::new();
    }
    // The first steps of an untrained model would flatten all that follows.
    let high = validation
        .iter()
        .map(|(_, loss)| *loss)
        .chain([unigram, last.1])
        .fold(f32::NEG_INFINITY, f32::max)
        .ceil();
    let training: Vec<(f32, f32)> = training.iter().copied().filter(|(_, loss)| *loss <= high).collect();
    let low = training
        .iter()
        .chain(validation)
        .map(|(_, loss)| *loss)
        .chain([unigram])
        .fold(f32::INFINITY, f32::min)
        .floor();
    let level: Vec<(f32, f32)> = (0..=LEVEL_DOTS)
        .map(|dot| (first.0 + (last.0 - first.0) * dot as f32 / LEVEL_DOTS as f32, unigram))
        .collect();
    let shapes = [Shape::Lines(&training), Shape::Lines(validation), Shape::Points(&level)];
    let mut chart = Chart::new_with_y_range(WIDTH, HEIGHT, first.0, last.0, low, high);
    let chart = chart
        .x_axis_style(LineStyle::Solid)
        .y_axis_style(LineStyle::None)
        .x_label_format(LabelFormat::Custom(Box::new(|step| format!("step {step:.0}"))))
        .y_label_format(LabelFormat::Custom(Box::new(|loss| format!("{loss:.2}"))))
        .y_tick_display(TickDisplay::Sparse)
        .lineplot(&shapes[0])
        .lineplot(&shapes[1])
        .lineplot(&shapes[2]);
    chart.axis();
    chart.figures();
    chart.to_string()
}

#[cfg(test)]
mod tests {
    use super::loss;

    #[test]
    fn a_falling_curve() {
        let training: Vec<(f32, f32)> =
            (0..=100).map(|step| (step as f32, 2.0 + 3.0 / (1.0 + step as f32 / 10.0))).collect();
        let validation = [(0.0, 5.1), (50.0, 2.6), (100.0, 2.4)];
        insta::assert_snapshot!(loss(&training, &validation, 3.3));
    }

    #[test]
    fn too_few_points_draw_nothing() {
        assert_eq!(loss(&[], &[], 3.0), "");
        assert_eq!(loss(&[(1.0, 2.0)], &[], 3.0), "");
    }
}
