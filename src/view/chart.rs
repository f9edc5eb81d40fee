//! The loss curve as a small plot of braille dots.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Widget};

/// Characters across, at least and at most, and down.
const WIDTH: (u16, u16) = (30, 78);
const HEIGHT: u16 = 14;
/// Dots of a level line.
const LEVEL_DOTS: u16 = 40;
/// Labels of an axis.
const LABELS: u16 = 4;

/// Draws training losses as a line, validation losses as a second one, and the unigram model's as a dotted level. Points
/// are (steps done, loss in nats). It is as wide as it may be in `columns`, but not wider than helps. Empty where there are
/// fewer than two training points to draw.
pub(crate) fn loss(
    training: &[(f64, f64)],
    validation: &[(f64, f64)],
    unigram: f64,
    columns: Option<u16>,
) -> String {
    let width = columns.unwrap_or(WIDTH.1).clamp(WIDTH.0, WIDTH.1);
    let (Some(first), Some(last)) = (training.first(), training.last()) else { return String::new() };
    if training.len() < 2 {
        return String::new();
    }
    // The first steps of an untrained model would flatten all that follows.
    let levels = || validation.iter().map(|(_, loss)| *loss).chain([unigram, last.1]);
    let high = levels().fold(f64::NEG_INFINITY, f64::max).ceil();
    let training: Vec<_> = training.iter().copied().filter(|(_, loss)| *loss <= high).collect();
    let losses = || training.iter().map(|(_, loss)| *loss).chain(levels());
    let low = losses().fold(f64::INFINITY, f64::min).floor();
    let between =
        |from: f64, to: f64, part: u16, parts: u16| from + (to - from) * f64::from(part) / f64::from(parts);
    let level: Vec<_> =
        (0..=LEVEL_DOTS).map(|dot| (between(first.0, last.0, dot, LEVEL_DOTS), unigram)).collect();
    let labels = |from: f64, to: f64, digits: usize| {
        (0..=LABELS).map(move |label| format!("{:.digits$}", between(from, to, label, LABELS)))
    };
    let dataset = |data, kind| Dataset::default().marker(Marker::Braille).graph_type(kind).data(data);
    let area = Rect::new(0, 0, width, HEIGHT);
    let mut buffer = Buffer::empty(area);
    Chart::new(vec![
        dataset(&training, GraphType::Line),
        dataset(validation, GraphType::Line),
        dataset(&level, GraphType::Scatter),
    ])
    .x_axis(Axis::default().bounds([first.0, last.0]).labels(labels(first.0, last.0, 0)))
    .y_axis(Axis::default().bounds([low, high]).labels(labels(low, high, 2)))
    .render(area, &mut buffer);
    let mut text = String::new();
    for row in buffer.content().chunks(usize::from(width)) {
        let line: String = row.iter().map(|cell| cell.symbol()).collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::loss;

    #[test]
    fn a_falling_curve() {
        let training: Vec<(f64, f64)> =
            (0..=100).map(|step| (f64::from(step), 2.0 + 3.0 / (1.0 + f64::from(step) / 10.0))).collect();
        let validation = [(25.0, 3.1), (50.0, 2.6), (100.0, 2.4)];
        insta::assert_snapshot!(loss(&training, &validation, 3.3, None));
        let narrow = loss(&training, &validation, 3.3, Some(50));
        assert!(narrow.lines().all(|line| line.chars().count() <= 50), "{narrow}");
    }

    #[test]
    fn too_few_points_draw_nothing() {
        assert_eq!(loss(&[], &[], 3.0, None), "");
        assert_eq!(loss(&[(1.0, 2.0)], &[], 3.0, None), "");
    }
}
