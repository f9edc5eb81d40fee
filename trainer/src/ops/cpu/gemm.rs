//! Matrix products: packed panels and a micro-kernel, after K. Goto and R. van de Geijn, "Anatomy of high-performance
//! matrix multiplication" (2008).
//!
//! [`product`] cuts one output among the pool's threads; [`multiply`] runs in one. Transposed factors cost a different
//! packing and nothing else.
//!
//! Invariant: an element's sum is taken over k in order, in steps of [`DEPTH`], so how an output is cut never changes it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::element::Element;
use super::gelu;
use super::isa::{Available, per_isa};
use super::kernel::{Kernel, Left, Tile, Transpose};
use super::pool::Pool;

/// Most k of a packed panel: a left panel fits the first-level cache, with room for the right one that streams by.
const DEPTH: usize = 256;
/// Least multiplications of a block of rows: enough that handing it out costs nothing next to it.
const LEAST_BLOCK: usize = 1 << 20;
/// Right panels that a thread packs at a time.
const RIGHT_PANELS: usize = 2;
/// Most columns packed at a time: they fit the second-level cache.
const COLUMNS: usize = 768;
/// Least multiplications that are worth waking other threads.
const LEAST_WORK: usize = 1 << 21;

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

/// What each thread works in; a thread takes its own alone.
#[derive(Default)]
pub(super) struct Workspace {
    /// Packed rows of a left factor.
    pub(super) left: Scratch,
    /// Attention's right factors.
    pub(super) right: [Scratch; 4],
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

/// Threads that share a product's work.
trait Hands {
    /// Calls `run` for each item, with memory of the thread's own to pack a left block into.
    fn each<T: Send>(&mut self, items: impl Iterator<Item = T> + Send, run: impl Fn(&mut Scratch, T) + Sync);
}

/// The caller's thread alone.
struct Alone<'a>(&'a mut Scratch);

impl Hands for Alone<'_> {
    fn each<T: Send>(&mut self, items: impl Iterator<Item = T> + Send, run: impl Fn(&mut Scratch, T) + Sync) {
        items.for_each(|item| run(self.0, item));
    }
}

/// The threads of a pool.
struct Together<'a> {
    pool: &'a Pool,
    workspaces: &'a [Mutex<Workspace>],
}

impl Hands for Together<'_> {
    fn each<T: Send>(&mut self, items: impl Iterator<Item = T> + Send, run: impl Fn(&mut Scratch, T) + Sync) {
        self.pool.each(items, |worker, item| run(&mut own(self.workspaces, worker).left, item));
    }
}

/// `out (+)= left * right`.
#[derive(Clone, Copy)]
pub(super) struct Multiplication<E> {
    pub(super) size: Size,
    pub(super) left: View<E>,
    pub(super) right: View<E>,
    pub(super) out: Output<E>,
    pub(super) accumulate: bool,
}

/// A right factor, packed whole.
pub(super) struct PackedRight<'a, E> {
    panels: &'a [E],
    depth: usize,
    columns: usize,
}

impl<'a, E: Element> PackedRight<'a, E> {
    /// # Safety
    /// `from` must have `depth` rows of `columns` elements.
    pub(super) unsafe fn new(
        available: Available,
        scratch: &'a mut Scratch,
        from: View<E>,
        depth: usize,
        columns: usize,
    ) -> Self {
        let kernel = &E::kernel(available);
        let panels = scratch.take(columns.next_multiple_of(kernel.lanes) * depth);
        // SAFETY: the caller's promise.
        unsafe { pack_right(available, kernel, from.transpose(), columns, depth, panels) };
        Self { panels, depth, columns }
    }
}

/// `out (+)= left * right` in this thread, with the first rows and columns of `right`: all its columns, or whole panels.
///
/// # Safety
/// The left factor and the output must have the size given; nothing else writes that factor or touches the output
/// meanwhile.
pub(super) unsafe fn multiply<E: Element>(
    available: Available,
    left_scratch: &mut Scratch,
    size: Size,
    left: View<E>,
    right: &PackedRight<'_, E>,
    out: Output<E>,
    accumulate: bool,
) {
    let kernel = &E::kernel(available);
    let whole = size.columns == right.columns || size.columns.is_multiple_of(kernel.columns);
    assert!(whole && size.columns <= right.columns && size.depth <= right.depth, "a part of a packed factor");
    for depth in steps(0..size.depth, even_step(size.depth, DEPTH)) {
        // SAFETY: the caller's promise.
        unsafe {
            let left = left_panels(
                available,
                kernel,
                left.from(0, depth.start),
                size.rows,
                depth.len(),
                left_scratch,
            );
            let right = |j: Range<usize>| {
                let width = j.len().next_multiple_of(kernel.lanes);
                right.panels[j.start * right.depth + depth.start * width..].as_ptr()
            };
            let accumulate = accumulate || depth.start > 0;
            let size = Size { depth: depth.len(), ..size };
            tiles(kernel, size, left, right, out, accumulate);
        }
    }
}

/// A multiplication by all hands. They pack a block of the right factor together; then each takes as many blocks of rows
/// as it can, so that a thread that the system holds up delays the others by one small block at most. `after` is called
/// for each part of the output, with its rows and columns, when it is done.
///
/// # Safety
/// As [`multiply`].
unsafe fn blocks<E: Element>(
    available: Available,
    mut hands: impl Hands,
    right_scratch: &mut Scratch,
    Multiplication { size, left, right, out, accumulate }: Multiplication<E>,
    after: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    let kernel = &E::kernel(available);
    let (left, right, out) = (&left, &right, &out);
    let column_step = even_step(size.columns, COLUMNS).next_multiple_of(kernel.columns);
    let depth_step = even_step(size.depth, DEPTH);
    let row_step = LEAST_BLOCK.div_ceil(column_step * depth_step).next_multiple_of(kernel.rows);
    let packed_right = right_scratch.take::<E>(column_step * depth_step);
    let parts = steps(0..size.columns, column_step)
        .flat_map(|columns| steps(0..size.depth, depth_step).map(move |depth| (columns.clone(), depth)));
    for (columns, depth) in parts {
        let width = RIGHT_PANELS * kernel.columns;
        let packing = steps(columns.clone(), width).zip(packed_right.chunks_mut(width * depth.len()));
        hands.each(packing, |_, (columns, packed)| {
            // SAFETY: the factor has these elements.
            unsafe {
                let right = right.from(depth.start, columns.start).transpose();
                pack_right(available, kernel, right, columns.len(), depth.len(), packed);
            }
        });
        let packed_right = &*packed_right;
        hands.each(steps(0..size.rows, row_step), |scratch, rows| {
            // SAFETY: the factor has these elements.
            let left = unsafe {
                let left = left.from(rows.start, depth.start);
                left_panels(available, kernel, left, rows.len(), depth.len(), scratch)
            };
            // SAFETY: the output has these elements, no other thread has these rows, and the panels are packed.
            unsafe {
                let out = Output { start: out.start.add(rows.start * out.stride + columns.start), ..*out };
                let size = Size { rows: rows.len(), columns: columns.len(), depth: depth.len() };
                let accumulate = accumulate || depth.start > 0;
                let right = |j: Range<usize>| packed_right[j.start * size.depth..].as_ptr();
                tiles(kernel, size, left, right, out, accumulate);
            }
            if depth.end == size.depth {
                after(rows, columns.clone());
            }
        });
    }
}

/// `left` and `right` tell where the factor's part for a tile is, from its first row and its columns.
///
/// # Safety
/// The right panels must be packed for the size, the left factor and the output have it.
unsafe fn tiles<E: Element>(
    kernel: &Kernel<E>,
    size: Size,
    left: impl Fn(usize) -> Left<E>,
    right: impl Fn(Range<usize>) -> *const E,
    out: Output<E>,
    accumulate: bool,
) {
    for i in steps(0..size.rows, kernel.rows) {
        for j in steps(0..size.columns, kernel.columns) {
            // SAFETY: the tile lies in both factors and in the output.
            unsafe {
                kernel.run(Tile {
                    depth: size.depth,
                    left: left(i.start),
                    right: right(j.clone()),
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

/// The left factor of a block of rows as the kernel reads it: where it is, if its elements follow each other along k, else
/// packed.
///
/// # Safety
/// `from` must have `rows` rows of `depth` elements.
unsafe fn left_panels<E: Element>(
    available: Available,
    kernel: &Kernel<E>,
    from: View<E>,
    rows: usize,
    depth: usize,
    scratch: &mut Scratch,
) -> impl Fn(usize) -> Left<E> {
    let packed = (from.column != 1).then(|| {
        let packed = scratch.take(rows.next_multiple_of(kernel.rows) * depth);
        for (rows, panel) in steps(0..rows, kernel.rows).zip(packed.chunks_exact_mut(kernel.rows * depth)) {
            // SAFETY: the caller's promise.
            unsafe { pack(available, kernel, kernel.rows, from.from(rows.start, 0), rows.len(), panel) };
        }
        packed.as_ptr()
    });
    move |row| match packed {
        Some(packed) => Left::Packed(packed.wrapping_add(row * depth)),
        None => Left::Rows { start: from.start.wrapping_add(row * from.row), stride: from.row },
    }
}

/// Packs the right factor's `columns`, `depth` elements of each, into panels of the kernel's columns; the last panel is
/// as wide as its columns in whole vectors.
///
/// # Safety
/// `from`, the factor's transpose, must have the elements.
unsafe fn pack_right<E: Element>(
    available: Available,
    kernel: &Kernel<E>,
    from: View<E>,
    columns: usize,
    depth: usize,
    packed: &mut [E],
) {
    for (columns, panel) in steps(0..columns, kernel.columns).zip(packed.chunks_mut(kernel.columns * depth)) {
        let width = columns.len().next_multiple_of(kernel.lanes);
        // SAFETY: the caller's promise.
        unsafe {
            let from = from.from(columns.start, 0);
            pack(available, kernel, width, from, columns.len(), &mut panel[..width * depth]);
        }
    }
}

/// Packs `rows` rows of `from` into a panel of `width` rows: for each column, the rows' elements next to each other, with
/// zeros for rows that are not there.
///
/// # Safety
/// `from` must have the elements, as many columns as the panel.
unsafe fn pack<E: Element>(
    available: Available,
    kernel: &Kernel<E>,
    width: usize,
    from: View<E>,
    rows: usize,
    panel: &mut [E],
) {
    if from.column == 1 && kernel.transposes() {
        // SAFETY: the caller's promise, and the panel's length.
        unsafe {
            kernel.transpose(Transpose {
                from: from.start,
                stride: from.row,
                rows,
                depth: panel.len() / width,
                panel: panel.as_mut_ptr(),
                width,
            });
        }
        return;
    }
    match width {
        4 => pack_panel_4(available, from, rows, panel),
        6 => pack_panel_6(available, from, rows, panel),
        8 => pack_panel_8(available, from, rows, panel),
        9 => pack_panel_9(available, from, rows, panel),
        16 => pack_panel_16(available, from, rows, panel),
        32 => pack_panel_32(available, from, rows, panel),
        48 => pack_panel_48(available, from, rows, panel),
        _ => unreachable!("no kernel has panels of {width}"),
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
pack_panel!(
    pack_panel_4 4 pack_panel_6 6 pack_panel_8 8 pack_panel_9 9 pack_panel_16 16 pack_panel_32 32 pack_panel_48 48
);

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

/// What a product is added to.
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
/// As [`multiply`]; the output and what `end` writes are whole rows, without gaps.
pub(super) unsafe fn product<E: Element>(
    available: Available,
    pool: &Pool,
    workspaces: &[Mutex<Workspace>],
    right_scratch: &mut Scratch,
    what: Multiplication<E>,
    begin: Begin<'_, E>,
    end: End<'_, E>,
) {
    let after = |rows: Range<usize>, columns: Range<usize>| {
        for row in rows {
            // SAFETY: parts are disjoint, and the caller promised the output.
            let out = unsafe { what.out.row(row, &columns) };
            let own = row * what.size.columns;
            let own = own + columns.start..own + columns.end;
            match begin {
                Begin::Zero | Begin::Accumulate => {}
                Begin::Bias(bias) => add(available, out, &bias[columns.clone()]),
                Begin::BiasAndResidual(bias, residual) => {
                    add(available, out, &bias[columns.clone()]);
                    add(available, out, &residual[own.clone()]);
                }
            }
            match end {
                End::Keep => {}
                // SAFETY: as above, for the other output.
                End::Gelu(into) => gelu::forward(available, unsafe { into.row(row, &columns) }, out),
                End::Multiply(by) => scale(available, out, &by[own]),
            }
        }
    };
    let Size { rows, columns, depth } = what.size;
    // SAFETY: the caller's promise.
    unsafe {
        if rows * columns * depth < LEAST_WORK {
            blocks(available, Alone(&mut own(workspaces, 0).left), right_scratch, what, after);
        } else {
            blocks(available, Together { pool, workspaces }, right_scratch, what, after);
        }
    }
}

per_isa! {
    fn add<E: Element>(to: &mut [E], x: &[E]) {
        for (to, &x) in to.iter_mut().zip(x) {
            *to += x;
        }
    }
}

per_isa! {
    fn scale<E: Element>(to: &mut [E], by: &[E]) {
        for (to, &by) in to.iter_mut().zip(by) {
            *to *= by;
        }
    }
}

/// The length of as many equal parts as there are parts of `most`.
fn even_step(len: usize, most: usize) -> usize {
    len.div_ceil(len.div_ceil(most).max(1)).max(1)
}

/// Consecutive parts of `range` of `step` each, the last perhaps shorter.
pub(super) fn steps(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + Send {
    let end = range.end;
    range.step_by(step).map(move |start| start..end.min(start + step))
}
