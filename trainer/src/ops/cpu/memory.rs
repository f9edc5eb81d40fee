//! The buffers, and slices of several of their spans at once.

use std::marker::PhantomData;

use bytemuck::Pod;
use memmap2::MmapMut;

use crate::ops::{AllocateError, Buffer, Span};

/// Buffers of elements. They come straight from the system: aligned to pages, 0, and without cost until touched.
pub(super) struct Memory<E> {
    buffers: Vec<MmapMut>,
    element: PhantomData<E>,
}

impl<E: Pod> Memory<E> {
    pub(super) fn new() -> Self {
        Self { buffers: Vec::new(), element: PhantomData }
    }

    pub(super) fn allocate(&mut self, purpose: &'static str, len: usize) -> Result<Span, AllocateError> {
        let refuse = |needed| AllocateError { purpose, needed };
        let bytes = len.max(1).checked_mul(size_of::<E>()).ok_or_else(|| refuse(u64::MAX))?;
        let buffer = MmapMut::map_anon(bytes).map_err(|_| refuse(bytes as u64))?;
        // Where the system offers large pages; without them everything works, a little slower.
        #[cfg(target_os = "linux")]
        let _ = buffer.advise(memmap2::Advice::HugePage);
        self.buffers.push(buffer);
        Ok(Span { buffer: Buffer(self.buffers.len() as u32 - 1), start: 0, len })
    }

    pub(super) fn read(&self, span: Span) -> &[E] {
        let buffer = &self.buffers[span.buffer.0 as usize];
        &bytemuck::cast_slice(buffer)[span.range()]
    }

    pub(super) fn write(&mut self, span: Span) -> &mut [E] {
        let buffer = &mut self.buffers[span.buffer.0 as usize];
        &mut bytemuck::cast_slice_mut(buffer)[span.range()]
    }

    /// Slices of `write`, to change, and of `read`.
    ///
    /// # Panics
    /// When one of `write` overlaps any other span, or a span lies outside its buffer.
    pub(super) fn split<const W: usize, const R: usize>(
        &mut self,
        write: [Span; W],
        read: [Span; R],
    ) -> ([&mut [E]; W], [&[E]; R]) {
        for (i, &span) in write.iter().enumerate() {
            for &other in write[i + 1..].iter().chain(&read) {
                assert!(
                    span.buffer != other.buffer
                        || span.range().end <= other.start
                        || other.range().end <= span.start,
                    "{span:?} overlaps {other:?}"
                );
            }
        }
        let written = write.map(|span| {
            let slice = self.write(span);
            (slice.as_mut_ptr(), slice.len())
        });
        let read = read.map(|span| {
            let slice = self.read(span);
            (slice.as_ptr(), slice.len())
        });
        // SAFETY: each pair is a slice of a buffer that `self` owns and that stays borrowed as long as the results. Those
        // to change overlap nothing else, as asserted.
        unsafe {
            (
                written.map(|(start, len)| std::slice::from_raw_parts_mut(start, len)),
                read.map(|(start, len)| std::slice::from_raw_parts(start, len)),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> (Memory<f32>, Span) {
        let mut memory = Memory::new();
        let span = memory.allocate("test", 100).unwrap();
        (memory, span)
    }

    #[test]
    fn spans_of_one_buffer_are_split() {
        let (mut memory, span) = memory();
        let ([a, b], [c]) = memory.split([span.slice(0..10), span.slice(10..20)], [span.slice(20..30)]);
        a.fill(1.0);
        b.fill(2.0);
        assert_eq!((a[9], b[0], c[0]), (1.0, 2.0, 0.0));
    }

    #[test]
    #[should_panic(expected = "overlaps")]
    fn overlapping_spans_are_refused() {
        let (mut memory, span) = memory();
        memory.split([span.slice(0..10)], [span.slice(9..20)]);
    }
}
