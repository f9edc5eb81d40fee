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
    /// Left panel: for each k, [`Kernel::rows`] elements.
    pub(super) left: *const E,
    /// Right panel: for each k, [`Kernel::columns`] elements.
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

/// A micro-kernel and the size of its panels.
#[derive(Clone, Copy)]
pub struct Kernel<E> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    run: unsafe fn(Available, Tile<E>),
    available: Available,
}

impl<E: Element> Kernel<E> {
    /// Written for the compiler to vectorise.
    pub(super) fn portable(available: Available) -> Self {
        Self { rows: PORTABLE_ROWS, columns: PORTABLE_COLUMNS, run: portable, available }
    }

    /// # Safety
    /// Panels must hold `depth` times [`Kernel::rows`] or [`Kernel::columns`] elements, and the output the rows and
    /// columns given, which nothing else reads or writes meanwhile.
    #[inline(always)]
    pub(super) unsafe fn run(&self, tile: Tile<E>) {
        // SAFETY: the caller's promise; `available` is what the kernel was chosen by.
        unsafe { (self.run)(self.available, tile) }
    }
}

impl Kernel<f32> {
    /// The best for f32.
    pub(super) fn f32(available: Available) -> Self {
        let (rows, columns, run): (_, _, unsafe fn(Available, Tile<f32>)) = match available.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => (x86::avx512::ROWS, x86::avx512::COLUMNS, x86::avx512::run),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (x86::avx2::ROWS, x86::avx2::COLUMNS, x86::avx2::run),
            _ => return Self::portable(available),
        };
        Self { rows, columns, run, available }
    }
}

const PORTABLE_ROWS: usize = 4;
const PORTABLE_COLUMNS: usize = 8;

/// # Safety
/// As [`Kernel::run`].
unsafe fn portable<E: Element>(available: Available, tile: Tile<E>) {
    // SAFETY: the caller's promise about the panels.
    let (left, right) = unsafe {
        (
            std::slice::from_raw_parts(tile.left, tile.depth * PORTABLE_ROWS),
            std::slice::from_raw_parts(tile.right, tile.depth * PORTABLE_COLUMNS),
        )
    };
    let mut sums = [[E::ZERO; PORTABLE_COLUMNS]; PORTABLE_ROWS];
    portable_sums(available, left, right, &mut sums);
    for (i, sums) in sums.iter().enumerate().take(tile.rows) {
        // SAFETY: the caller's promise about the output.
        let out = unsafe { std::slice::from_raw_parts_mut(tile.out.add(i * tile.stride), tile.columns) };
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = if tile.accumulate { *out + sum } else { sum };
        }
    }
}

per_isa! {
    fn portable_sums<E: Element>(
        left: &[E],
        right: &[E],
        sums: &mut [[E; PORTABLE_COLUMNS]; PORTABLE_ROWS],
    ) {
        let mut local = [[E::ZERO; PORTABLE_COLUMNS]; PORTABLE_ROWS];
        for (left, right) in left.chunks_exact(PORTABLE_ROWS).zip(right.chunks_exact(PORTABLE_COLUMNS)) {
            for (sums, &l) in local.iter_mut().zip(left) {
                for (sum, &r) in sums.iter_mut().zip(right) {
                    *sum += l * r;
                }
            }
        }
        *sums = local;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    /// A kernel of two vectors to a row, for each number of rows.
    macro_rules! kernel {
        ($name:ident, $feature:literal, $lanes:literal, $rows:literal, [$($r:literal)*],
         $zero:ident, $splat:ident, $load:ident, $store:ident, $fma:ident, $add:ident) => {
            pub(super) mod $name {
                use std::arch::x86_64::*;

                use super::super::{Available, Tile};

                pub(in super::super) const ROWS: usize = $rows;
                pub(in super::super) const COLUMNS: usize = 2 * $lanes;

                /// # Safety
                /// As [`super::super::Kernel::run`], on a processor with the instructions.
                pub(in super::super) unsafe fn run(_: Available, tile: Tile<f32>) {
                    // SAFETY: the caller's promise.
                    unsafe {
                        match tile.rows {
                            $($r => rows::<$r>(tile),)*
                            rows => unreachable!("{rows} rows in a tile of {ROWS}"),
                        }
                    }
                }

                #[target_feature(enable = $feature)]
                unsafe fn rows<const R: usize>(tile: Tile<f32>) {
                    let mut sums = [[$zero(); 2]; R];
                    let (mut left, mut right) = (tile.left, tile.right);
                    for _ in 0..tile.depth {
                        // SAFETY: the panels hold this step's elements.
                        unsafe {
                            let columns = [$load(right), $load(right.add($lanes))];
                            for (i, sums) in sums.iter_mut().enumerate() {
                                let row = $splat(*left.add(i));
                                sums[0] = $fma(row, columns[0], sums[0]);
                                sums[1] = $fma(row, columns[1], sums[1]);
                            }
                            left = left.add(ROWS);
                            right = right.add(COLUMNS);
                        }
                    }
                    for (i, sums) in sums.into_iter().enumerate() {
                        // SAFETY: the output holds `columns` elements in each row.
                        unsafe {
                            let out = tile.out.add(i * tile.stride);
                            if tile.columns == COLUMNS {
                                for (half, sum) in sums.into_iter().enumerate() {
                                    let out = out.add(half * $lanes);
                                    let value = if tile.accumulate { $add($load(out), sum) } else { sum };
                                    $store(out, value);
                                }
                            } else {
                                let mut row = [0.0_f32; COLUMNS];
                                $store(row.as_mut_ptr(), sums[0]);
                                $store(row.as_mut_ptr().add($lanes), sums[1]);
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

    // 28 of 32 registers hold sums.
    kernel!(
        avx512, "avx512f", 16, 14, [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
        _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps
    );
    // 12 of 16.
    kernel!(
        avx2, "avx2,fma", 8, 6, [1 2 3 4 5 6],
        _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps
    );
}
