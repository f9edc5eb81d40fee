//! Micro-kernels: a few rows times a few columns of a matrix product, held in registers.
//!
//! Invariant: every element is its own chain of operations over k in order, from 0, and the chain's result is added to
//! the output once. So neither the size of a tile nor its place changes the bits, and all instruction sets with fused
//! multiply-add give the same f32.

use super::element::Element;
use super::isa::{Available, Isa, per_isa};

/// Operands of one call.
#[derive(Clone, Copy)]
pub(super) struct Tile<E> {
    /// Number of products summed for each element.
    pub(super) depth: usize,
    /// Left factor.
    pub(super) left: Left<E>,
    /// Right panel: for each k, `columns` elements, rounded up to whole vectors.
    pub(super) right: *const E,
    /// First element of the output.
    pub(super) out: *mut E,
    /// Elements from one row of the output to the next.
    pub(super) stride: usize,
    /// Rows of the output, 1 to [`Kernel::rows`].
    pub(super) rows: usize,
    /// Columns of the output, 1 to [`Kernel::columns`].
    pub(super) columns: usize,
    /// Whether the output is added to or written.
    pub(super) accumulate: bool,
}

/// A tile's left factor.
#[derive(Clone, Copy)]
pub(super) enum Left<E> {
    /// Rows, whose elements follow each other along k.
    Rows {
        start: *const E,
        /// Elements from one row to the next.
        stride: usize,
    },
    /// A panel: for each k, [`Kernel::rows`] elements.
    Packed(*const E),
}

/// A micro-kernel and the size of its panels.
#[derive(Clone, Copy)]
pub struct Kernel<E> {
    /// Most rows of a tile.
    pub(super) rows: usize,
    /// Elements of a vector.
    pub(super) lanes: usize,
    /// Most columns of a tile, in whole vectors.
    pub(super) columns: usize,
    run: unsafe fn(Available, Tile<E>),
    transpose: Option<unsafe fn(Transpose<E>)>,
    available: Available,
}

/// Operands of packing a panel whose elements follow each other along k.
#[derive(Clone, Copy)]
pub(super) struct Transpose<E> {
    /// Element (row, k) is at `row * stride + k`.
    pub(super) from: *const E,
    pub(super) stride: usize,
    /// Rows that are there, at most `width`.
    pub(super) rows: usize,
    pub(super) depth: usize,
    /// Element (row, k) goes to `k * width + row`; 0 goes where there is no row.
    pub(super) panel: *mut E,
    pub(super) width: usize,
}

impl<E: Element> Kernel<E> {
    /// Written for the compiler to vectorise.
    pub(super) fn portable(available: Available) -> Self {
        Self {
            rows: PORTABLE_ROWS,
            lanes: PORTABLE_COLUMNS,
            columns: PORTABLE_COLUMNS,
            run: portable,
            transpose: None,
            available,
        }
    }

    /// Whether [`Kernel::transpose`] has instructions to use.
    pub(super) fn transposes(&self) -> bool {
        self.transpose.is_some()
    }

    /// Packs a panel.
    ///
    /// # Safety
    /// `from` must have the rows, `depth` elements of each, and the panel hold `width` times `depth` elements.
    ///
    /// # Panics
    /// When there are no instructions for it.
    pub(super) unsafe fn transpose(&self, transpose: Transpose<E>) {
        let Some(run) = self.transpose else {
            panic!("no transposition for {:?}", self.available);
        };
        // SAFETY: the caller's promise; the kernel was chosen by what the processor has.
        unsafe { run(transpose) }
    }

    /// # Safety
    /// The left factor must have `rows` times `depth` elements, the right panel hold as many as [`Tile::right`] says, and
    /// the output have the rows and columns given, which nothing else reads or writes meanwhile.
    #[inline(always)]
    pub(super) unsafe fn run(&self, tile: Tile<E>) {
        // SAFETY: the caller's promise; `available` is what the kernel was chosen by.
        unsafe { (self.run)(self.available, tile) }
    }
}

impl Kernel<f32> {
    /// The best for f32.
    pub(super) fn f32(available: Available) -> Self {
        match available.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Self {
                rows: x86::avx512::ROWS,
                lanes: x86::avx512::LANES,
                columns: x86::avx512::COLUMNS,
                run: x86::avx512::run,
                transpose: Some(x86::transpose),
                available,
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Self {
                rows: x86::avx2::ROWS,
                lanes: x86::avx2::LANES,
                columns: x86::avx2::COLUMNS,
                run: x86::avx2::run,
                transpose: None,
                available,
            },
            _ => Self::portable(available),
        }
    }
}

const PORTABLE_ROWS: usize = 4;
const PORTABLE_COLUMNS: usize = 8;

/// # Safety
/// As [`Kernel::run`].
unsafe fn portable<E: Element>(available: Available, tile: Tile<E>) {
    let mut sums = [[E::ZERO; PORTABLE_COLUMNS]; PORTABLE_ROWS];
    portable_sums(available, tile, &mut sums);
    for (i, sums) in sums.iter().enumerate().take(tile.rows) {
        // SAFETY: the caller's promise about the output.
        let out = unsafe { std::slice::from_raw_parts_mut(tile.out.add(i * tile.stride), tile.columns) };
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = if tile.accumulate { *out + sum } else { sum };
        }
    }
}

per_isa! {
    /// Rows of the tile that are not there are the last one again.
    fn portable_sums<E: Element>(tile: Tile<E>, sums: &mut [[E; PORTABLE_COLUMNS]; PORTABLE_ROWS]) {
        let mut local = [[E::ZERO; PORTABLE_COLUMNS]; PORTABLE_ROWS];
        let (left, row, step) = match tile.left {
            Left::Rows { start, stride } => (start, stride, 1),
            Left::Packed(start) => (start, 1, PORTABLE_ROWS),
        };
        let rows: [usize; PORTABLE_ROWS] = std::array::from_fn(|i| i.min(tile.rows - 1) * row);
        for k in 0..tile.depth {
            // SAFETY: the promise of the caller of [`portable`] about the factors.
            let (left, right) = unsafe {
                (
                    rows.map(|row| *left.add(row + k * step)),
                    *tile.right.add(k * PORTABLE_COLUMNS).cast::<[E; PORTABLE_COLUMNS]>(),
                )
            };
            for (sums, l) in local.iter_mut().zip(left) {
                for (sum, r) in sums.iter_mut().zip(right) {
                    *sum += l * r;
                }
            }
        }
        *sums = local;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    /// A kernel for each number of rows and of vectors to a row. The more vectors the better, because a row's element is
    /// broadcast once for all of them; but sums, the vectors and one broadcast element need a register each, and the
    /// compiler one more to load ahead: a sum that is kept in memory costs half the speed.
    macro_rules! kernel {
        ($name:ident, $feature:literal, $lanes:literal, $rows:literal, [$($r:literal)*], $vectors:literal, [$($v:literal)*],
         $zero:ident, $splat:ident, $load:ident, $store:ident, $fma:ident, $add:ident) => {
            pub(super) mod $name {
                use std::arch::x86_64::*;

                use super::super::{Available, Left, Tile};

                pub(in super::super) const ROWS: usize = $rows;
                pub(in super::super) const LANES: usize = $lanes;
                pub(in super::super) const COLUMNS: usize = $vectors * LANES;
                /// Steps of k that are written out.
                const UNROLLED: usize = 4;

                /// # Safety
                /// As [`super::super::Kernel::run`], on a processor with the instructions.
                pub(in super::super) unsafe fn run(_: Available, tile: Tile<f32>) {
                    // SAFETY: the caller's promise.
                    unsafe {
                        match tile.columns.div_ceil(LANES) {
                            $($v => rows::<$v>(tile),)*
                            vectors => unreachable!("{vectors} vectors in a tile of {COLUMNS} columns"),
                        }
                    }
                }

                unsafe fn rows<const VECTORS: usize>(tile: Tile<f32>) {
                    // SAFETY: the caller's promise.
                    unsafe {
                        match (tile.rows, tile.left) {
                            $(($r, Left::Rows { .. }) => sums::<$r, VECTORS, false>(tile),
                              ($r, Left::Packed(_)) => sums::<$r, VECTORS, true>(tile),)*
                            (rows, _) => unreachable!("{rows} rows in a tile of {ROWS}"),
                        }
                    }
                }

                #[target_feature(enable = $feature)]
                unsafe fn sums<const R: usize, const VECTORS: usize, const PACKED: bool>(tile: Tile<f32>) {
                    let (left, stride) = match tile.left {
                        Left::Rows { start, stride } => (start, stride),
                        Left::Packed(start) => (start, 1),
                    };
                    // Opaque, because the compiler would rather keep one of them and compute the others at each step.
                    let rows: [*const f32; R] =
                        std::hint::black_box(std::array::from_fn(|i| left.wrapping_add(i * stride)));
                    let mut sums = [[$zero(); VECTORS]; R];
                    let mut step = |k: usize| {
                        let right = tile.right.wrapping_add(k * VECTORS * LANES);
                        // SAFETY: both factors have these elements.
                        let load = |j| unsafe { $load(right.wrapping_add(j * LANES)) };
                        let columns: [_; VECTORS] = std::array::from_fn(load);
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let at = if PACKED { left.wrapping_add(k * ROWS + i) } else { rows[i].wrapping_add(k) };
                            // SAFETY: as above.
                            let row = $splat(unsafe { *at });
                            for (sum, column) in sums.iter_mut().zip(columns) {
                                *sum = $fma(row, column, *sum);
                            }
                        }
                    };
                    let mut k = 0;
                    while k + UNROLLED <= tile.depth {
                        for unrolled in 0..UNROLLED {
                            step(k + unrolled);
                        }
                        k += UNROLLED;
                    }
                    for k in k..tile.depth {
                        step(k);
                    }
                    for (i, sums) in sums.into_iter().enumerate() {
                        // SAFETY: the output holds `columns` elements in each row.
                        unsafe {
                            let out = tile.out.add(i * tile.stride);
                            if tile.columns == VECTORS * LANES {
                                for (j, sum) in sums.into_iter().enumerate() {
                                    let out = out.add(j * LANES);
                                    $store(out, if tile.accumulate { $add($load(out), sum) } else { sum });
                                }
                            } else {
                                let mut row = [0.0_f32; COLUMNS];
                                for (j, sum) in sums.into_iter().enumerate() {
                                    $store(row.as_mut_ptr().add(j * LANES), sum);
                                }
                                for (j, sum) in row.into_iter().enumerate().take(tile.columns) {
                                    let out = out.add(j);
                                    *out = if tile.accumulate { *out + sum } else { sum };
                                }
                            }
                        }
                    }
                }
            }
        };
    }

    // 27 of 32 registers hold sums.
    kernel!(
        avx512, "avx512f", 16, 9, [1 2 3 4 5 6 7 8 9], 3, [1 2 3],
        _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps
    );
    // 12 of 16.
    kernel!(
        avx2, "avx2,fma", 8, 6, [1 2 3 4 5 6], 2, [1 2],
        _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps
    );

    /// # Safety
    /// As [`super::Kernel::transpose`], on a processor with AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transpose(t: super::Transpose<f32>) {
        use std::arch::x86_64::*;
        let mask = |count: usize| ((1_u32 << count.min(16)) - 1) as __mmask16;
        for row in (0..t.width).step_by(16) {
            let store = mask(t.width - row);
            for k in (0..t.depth).step_by(16) {
                let load = mask(t.depth - k);
                let mut x: [__m512; 16] = std::array::from_fn(|i| {
                    let start = t.from.wrapping_add((row + i) * t.stride + k);
                    // The next panel is read next. Prefetching faults nowhere.
                    _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(t.width * t.stride).cast());
                    let there = if row + i < t.rows { load } else { 0 };
                    // SAFETY: the mask ends at the row's last element, or has none.
                    unsafe { _mm512_maskz_loadu_ps(there, start) }
                });
                // Pairs of rows, then of pairs, within each quarter of a vector; then the quarters.
                let mut y = [_mm512_setzero_ps(); 16];
                for i in 0..8 {
                    y[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
                    y[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
                }
                let pair = |high: bool, a: __m512, b: __m512| {
                    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                    _mm512_castpd_ps(if high { _mm512_unpackhi_pd(a, b) } else { _mm512_unpacklo_pd(a, b) })
                };
                for i in 0..4 {
                    for j in 0..4 {
                        x[4 * i + j] = pair(j % 2 == 1, y[4 * i + j / 2], y[4 * i + j / 2 + 2]);
                    }
                }
                for j in 0..4 {
                    let low = [0, 8].map(|i| _mm512_shuffle_f32x4::<0x88>(x[i + j], x[i + 4 + j]));
                    let high = [0, 8].map(|i| _mm512_shuffle_f32x4::<0xdd>(x[i + j], x[i + 4 + j]));
                    y[j] = _mm512_shuffle_f32x4::<0x88>(low[0], low[1]);
                    y[4 + j] = _mm512_shuffle_f32x4::<0x88>(high[0], high[1]);
                    y[8 + j] = _mm512_shuffle_f32x4::<0xdd>(low[0], low[1]);
                    y[12 + j] = _mm512_shuffle_f32x4::<0xdd>(high[0], high[1]);
                }
                for (i, y) in y.into_iter().enumerate() {
                    if i < t.depth - k {
                        // SAFETY: the panel has this k, and the mask ends at its last row.
                        unsafe { _mm512_mask_storeu_ps(t.panel.add((k + i) * t.width + row), store, y) };
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_into_its_panel_alone() {
        for isa in Isa::available() {
            let kernel = Kernel::f32(Available::new(isa));
            if !kernel.transposes() {
                continue;
            }
            for (width, rows, depth) in [(16, 16, 16), (16, 9, 37), (48, 48, 5), (48, 33, 64), (32, 1, 1)] {
                let stride = depth + 3;
                let from: Vec<f32> = (0..rows * stride).map(|i| i as f32 + 1.0).collect();
                let mut panel = vec![-1.0_f32; width * depth + 16];
                // SAFETY: both have the sizes given.
                unsafe {
                    kernel.transpose(Transpose {
                        from: from.as_ptr(),
                        stride,
                        rows,
                        depth,
                        panel: panel.as_mut_ptr(),
                        width,
                    });
                }
                let (panel, beyond) = panel.split_at(width * depth);
                for (at, &found) in panel.iter().enumerate() {
                    let (k, row) = (at / width, at % width);
                    let expect = if row < rows { from[row * stride + k] } else { 0.0 };
                    assert_eq!(found, expect, "{width} {rows} {depth}: {k} {row}");
                }
                assert!(beyond.iter().all(|&x| x == -1.0), "{width} {rows} {depth}");
            }
        }
    }
}
