//! Matrix products: packed panels and a micro-kernel, after K. Goto and R. van de Geijn, "Anatomy of high-performance
//! matrix multiplication" (2008).
//!
//! [`multiply`] runs in one thread; [`product`] cuts one output among the pool's. Transposed factors cost a different
//! packing and nothing else.
//!
//! Invariant: an element's sum is taken over k in order, in steps of [`DEPTH`], so how an output is cut never changes it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::element::Element;
use super::gelu;
use super::isa::{Available, per_isa};
use super::kernel::{Kernel, Tile, Transpose};
use super::pool::Pool;

/// k of a packed panel: a right panel fits the first-level cache.
const DEPTH: usize = 256;
/// Left panels packed at a time: they fit the second-level cache.
const LEFT_PANELS: usize = 12;
/// Most columns packed at a time: with left panels and their part of the output they fit the second-level cache.
const COLUMNS: usize = 768;
/// Least multiplications that are worth another piece of work.
const LEAST_WORK: usize = 1 << 20;

/// A cache line, so that panels are aligned to one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u64; 8]);

// SAFETY: plain integers without padding, for which all bits 0 are a value.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above, and `repr(C)`.
unsafe impl bytemuck::Pod for Line {}

/// Memory that grows to the largest length asked for, and stays.
#[derive(Default)]
pub(super) struct Scratch(Vec<Line>);

impl Scratch {
    pub(super) fn take<E: Element>(&mut self, len: usize) -> &mut [E] {
        let lines = (len * size_of::<E>()).div_ceil(size_of::<Line>());
        if self.0.len() < lines {
            self.0.resize(lines, Line([0; 8]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}

/// What one thread packs panels into.
#[derive(Default)]
pub(super) struct Panels {
    left: Scratch,
    right: Scratch,
}

/// What each thread works in; a thread takes its own alone.
#[derive(Default)]
pub(super) struct Workspace {
    pub(super) panels: Panels,
    pub(super) scores: Scratch,
    pub(super) dscores: Scratch,
}

pub(super) fn own(workspaces: &[Mutex<Workspace>], worker: usize) -> MutexGuard<'_, Workspace> {
    // Its content means nothing between operations, so one left behind by a panic is as good as any.
    workspaces[worker].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A factor: element (i, j) is at `i * row + j * column`.
#[derive(Clone, Copy)]
pub(super) struct View<E> {
    pub(super) start: *const E,
    pub(super) row: usize,
    pub(super) column: usize,
}

impl<E> View<E> {
    pub(super) fn transpose(self) -> Self {
        Self { start: self.start, row: self.column, column: self.row }
    }

    /// # Safety
    /// Element (row, column) must lie in the same allocation as the first.
    pub(super) unsafe fn from(self, row: usize, column: usize) -> Self {
        Self {
            // SAFETY: the caller's promise.
            start: unsafe { self.start.add(row * self.row + column * self.column) },
            ..self
        }
    }
}

/// An output: element (i, j) is at `i * stride + j`.
#[derive(Clone, Copy)]
pub(super) struct Output<E> {
    pub(super) start: *mut E,
    pub(super) stride: usize,
}

impl<E> Output<E> {
    /// # Safety
    /// The elements must be there, and be nobody else's meanwhile.
    pub(super) unsafe fn row<'a>(self, row: usize, columns: &Range<usize>) -> &'a mut [E] {
        // SAFETY: the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(row * self.stride + columns.start), columns.len())
        }
    }
}

// SAFETY: these are pointers; those who follow them promise that it is allowed.
unsafe impl<E: Sync> Sync for View<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Output<E> {}

/// Sizes of a product: (rows, depth) times (depth, columns).
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) depth: usize,
}

/// `out (+)= left * right` in this thread. `before` and `after` are called for each part of the output, with its rows
/// and columns, before its first and after its last step over k; with `before`, the output is always added to.
///
/// # Safety
/// The factors and the output must have the sizes given; nothing else writes the factors or touches the output meanwhile.
#[expect(clippy::too_many_arguments, reason = "a product's own")]
pub(super) unsafe fn multiply<E: Element>(
    available: Available,
    panels: &mut Panels,
    size: Size,
    left: View<E>,
    right: View<E>,
    out: Output<E>,
    accumulate: bool,
    before: impl Fn(Range<usize>, Range<usize>),
    after: impl Fn(Range<usize>, Range<usize>),
) {
    let kernel = E::kernel(available);
    let most_rows = LEFT_PANELS * kernel.rows;
    let depth_step = DEPTH.min(size.depth);
    let packed_left = panels.left.take(most_rows * depth_step);
    let packed_right =
        panels.right.take(COLUMNS.min(size.columns).next_multiple_of(kernel.columns) * depth_step);
    for columns in steps(0..size.columns, COLUMNS) {
        for depth in steps(0..size.depth, DEPTH) {
            // SAFETY: the factor has these elements.
            unsafe {
                let right = right.from(depth.start, columns.start).transpose();
                pack(available, &kernel, kernel.columns, right, columns.len(), depth.len(), packed_right);
            }
            for rows in steps(0..size.rows, most_rows) {
                // SAFETY: as above.
                unsafe {
                    let left = left.from(rows.start, depth.start);
                    pack(available, &kernel, kernel.rows, left, rows.len(), depth.len(), packed_left);
                }
                if depth.start == 0 {
                    before(rows.clone(), columns.clone());
                }
                let accumulate = accumulate || depth.start > 0;
                // SAFETY: the output has these elements, and the panels are packed.
                unsafe {
                    let out = Output { start: out.start.add(rows.start * out.stride + columns.start), ..out };
                    let size = Size { rows: rows.len(), columns: columns.len(), depth: depth.len() };
                    tiles(&kernel, size, packed_left, packed_right, out, accumulate);
                }
                if depth.end == size.depth {
                    after(rows, columns.clone());
                }
            }
        }
    }
}

/// # Safety
/// The panels must be packed for the size, and the output have it.
unsafe fn tiles<E: Element>(
    kernel: &Kernel<E>,
    size: Size,
    left: &[E],
    right: &[E],
    out: Output<E>,
    accumulate: bool,
) {
    for (j, right) in
        steps(0..size.columns, kernel.columns).zip(right.chunks_exact(kernel.columns * size.depth))
    {
        for (i, left) in steps(0..size.rows, kernel.rows).zip(left.chunks_exact(kernel.rows * size.depth)) {
            // SAFETY: the chunks are panels of this depth, and the tile lies in the output.
            unsafe {
                kernel.run(Tile {
                    depth: size.depth,
                    left: left.as_ptr(),
                    right: right.as_ptr(),
                    out: out.start.add(i.start * out.stride + j.start),
                    stride: out.stride,
                    rows: i.len(),
                    columns: j.len(),
                    accumulate,
                });
            }
        }
    }
}

/// Packs `count` rows of `from`, `depth` columns of each, into panels of `width` rows: for each panel and column, the
/// rows' elements next to each other, with zeros for rows that are not there.
///
/// # Safety
/// `from` must have the elements.
unsafe fn pack<E: Element>(
    available: Available,
    kernel: &Kernel<E>,
    width: usize,
    from: View<E>,
    count: usize,
    depth: usize,
    packed: &mut [E],
) {
    for (rows, panel) in steps(0..count, width).zip(packed.chunks_exact_mut(width * depth)) {
        // SAFETY: the caller's promise.
        let from = unsafe { from.from(rows.start, 0) };
        if from.column == 1 && kernel.transposes() {
            // SAFETY: the caller's promise, and the panel's length.
            unsafe {
                kernel.transpose(Transpose {
                    from: from.start,
                    stride: from.row,
                    rows: rows.len(),
                    depth,
                    panel: panel.as_mut_ptr(),
                    width,
                });
            }
            continue;
        }
        match width {
            4 => pack_panel_4(available, from, rows.len(), panel),
            6 => pack_panel_6(available, from, rows.len(), panel),
            8 => pack_panel_8(available, from, rows.len(), panel),
            14 => pack_panel_14(available, from, rows.len(), panel),
            16 => pack_panel_16(available, from, rows.len(), panel),
            32 => pack_panel_32(available, from, rows.len(), panel),
            _ => unreachable!("no kernel has panels of {width}"),
        }
    }
}

macro_rules! pack_panel {
    ($($name:ident $width:literal)*) => {$(
        per_isa! {
            fn $name<E: Element>(from: View<E>, rows: usize, panel: &mut [E]) {
                pack_rows::<E, $width>(from, rows, panel);
            }
        }
    )*};
}
pack_panel!(pack_panel_4 4 pack_panel_6 6 pack_panel_8 8 pack_panel_14 14 pack_panel_16 16 pack_panel_32 32);

#[inline(always)]
fn pack_rows<E: Element, const WIDTH: usize>(from: View<E>, rows: usize, panel: &mut [E]) {
    let (panel, _) = panel.as_chunks_mut::<WIDTH>();
    if rows == WIDTH && from.row == 1 {
        for (k, packed) in panel.iter_mut().enumerate() {
            // SAFETY: `pack`'s caller promised the elements.
            *packed = unsafe { from.start.add(k * from.column).cast::<[E; WIDTH]>().read_unaligned() };
        }
    } else if rows == WIDTH {
        for (k, packed) in panel.iter_mut().enumerate() {
            for (i, packed) in packed.iter_mut().enumerate() {
                // SAFETY: as above.
                *packed = unsafe { *from.start.add(i * from.row + k * from.column) };
            }
        }
    } else {
        for (k, packed) in panel.iter_mut().enumerate() {
            *packed = [E::ZERO; WIDTH];
            for (i, packed) in packed.iter_mut().enumerate().take(rows) {
                // SAFETY: as above.
                *packed = unsafe { *from.start.add(i * from.row + k * from.column) };
            }
        }
    }
}

/// What a product begins with.
#[derive(Clone, Copy)]
pub(super) enum Begin<'a, E> {
    Zero,
    Accumulate,
    Bias(&'a [E]),
    /// A row, and a matrix of the output's shape.
    BiasAndResidual(&'a [E], &'a [E]),
}

/// What a product ends with.
#[derive(Clone, Copy)]
pub(super) enum End<'a, E> {
    Keep,
    /// GELU of the output goes here, in the output's shape.
    Gelu(Output<E>),
    /// The output is multiplied by this matrix of its shape.
    Multiply(&'a [E]),
}

/// A product by all threads of the pool.
///
/// # Safety
/// As [`multiply`]; `out` and what `end` writes are whole rows, without gaps.
#[expect(clippy::too_many_arguments, reason = "a product's own")]
pub(super) unsafe fn product<E: Element>(
    available: Available,
    pool: &Pool,
    workspaces: &[Mutex<Workspace>],
    size: Size,
    left: View<E>,
    right: View<E>,
    out: Output<E>,
    begin: Begin<'_, E>,
    end: End<'_, E>,
) {
    let kernel = E::kernel(available);
    let pieces = cut(size, &kernel, pool.threads());
    let (left, right, out_ref, end) = (&left, &right, &out, &end);
    pool.each(pieces, |worker, (piece_rows, piece_columns)| {
        let mut workspace = own(workspaces, worker);
        let at = |rows: &Range<usize>, columns: &Range<usize>| {
            (
                piece_rows.start + rows.start..piece_rows.start + rows.end,
                piece_columns.start + columns.start..piece_columns.start + columns.end,
            )
        };
        let before = |rows: Range<usize>, columns: Range<usize>| {
            let (rows, columns) = at(&rows, &columns);
            for row in rows {
                // SAFETY: pieces are disjoint, and the caller promised the output.
                let out = unsafe { out_ref.row(row, &columns) };
                match begin {
                    Begin::Zero | Begin::Accumulate => {}
                    Begin::Bias(bias) => out.copy_from_slice(&bias[columns.clone()]),
                    Begin::BiasAndResidual(bias, residual) => {
                        let residual = &residual[row * size.columns..][columns.clone()];
                        for ((out, &b), &r) in out.iter_mut().zip(&bias[columns.clone()]).zip(residual) {
                            *out = b + r;
                        }
                    }
                }
            }
        };
        let after = |rows: Range<usize>, columns: Range<usize>| {
            let (rows, columns) = at(&rows, &columns);
            for row in rows {
                // SAFETY: as above.
                let out = unsafe { out_ref.row(row, &columns) };
                match end {
                    End::Keep => {}
                    // SAFETY: as above, for the other output.
                    End::Gelu(into) => gelu::forward(available, unsafe { into.row(row, &columns) }, out),
                    End::Multiply(by) => {
                        for (out, &by) in out.iter_mut().zip(&by[row * size.columns..][columns.clone()]) {
                            *out *= by;
                        }
                    }
                }
            }
        };
        // SAFETY: pieces are disjoint parts of the output; the rest is the caller's promise.
        unsafe {
            multiply(
                available,
                &mut workspace.panels,
                Size { rows: piece_rows.len(), columns: piece_columns.len(), depth: size.depth },
                left.from(piece_rows.start, 0),
                right.from(0, piece_columns.start),
                Output {
                    start: out_ref.start.add(piece_rows.start * out_ref.stride + piece_columns.start),
                    ..*out_ref
                },
                !matches!(begin, Begin::Zero),
                before,
                after,
            );
        }
    });
}

/// Cuts an output into pieces along the side whose cut makes less be packed twice.
fn cut<E: Element>(
    size: Size,
    kernel: &Kernel<E>,
    threads: usize,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + Send + use<E> {
    let by_columns = size.rows < size.columns;
    let (len, unit) = if by_columns { (size.columns, kernel.columns) } else { (size.rows, kernel.rows) };
    let pieces = (size.rows * size.columns * size.depth / LEAST_WORK).clamp(1, threads);
    steps(0..len, len.div_ceil(pieces).next_multiple_of(unit))
        .map(move |part| if by_columns { (0..size.rows, part) } else { (part, 0..size.columns) })
}

/// Consecutive parts of `range` of `step` each, the last perhaps shorter.
pub(super) fn steps(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + Send {
    let end = range.end;
    range.step_by(step).map(move |start| start..end.min(start + step))
}
