//! Instruction sets, chosen when the program runs, so that one binary for any x86-64 uses what its processor has.

/// An instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What every processor of the target has.
    Baseline,
    /// AVX2 and FMA: 8 lanes of f32.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL): 16 lanes of f32.
    Avx512,
}

impl Isa {
    /// All that this processor has, the best last.
    pub fn available() -> Vec<Self> {
        [Self::Baseline, Self::Avx2, Self::Avx512].into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The best that this processor has.
    pub fn best() -> Self {
        [Self::Avx512, Self::Avx2].into_iter().find(|isa| isa.is_available()).unwrap_or(Self::Baseline)
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

/// Proof that the processor has an instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Available(Isa);

impl Available {
    /// # Panics
    /// When the processor does not have it.
    pub(super) fn new(isa: Isa) -> Self {
        assert!(isa.is_available(), "this processor has no {isa:?}");
        Self(isa)
    }

    pub(super) fn isa(self) -> Isa {
        self.0
    }
}

/// Compiles a function's body once for each instruction set, for the compiler to vectorise, and picks one at the call,
/// whose first argument is an [`Available`]. Sums must have their lanes written out, since the compiler does not reorder
/// them; so all instruction sets give the same bits.
macro_rules! per_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$e:ident: $bound:path>($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name<$e: $bound>(available: $crate::ops::cpu::isa::Available, $($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$e: $bound>($($arg: $type),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512<$e: $bound>($($arg: $type),*) $(-> $ret)? {
                body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<$e: $bound>($($arg: $type),*) $(-> $ret)? {
                body($($arg),*)
            }
            match available.isa() {
                // SAFETY: `available` proves that the processor has the features.
                #[cfg(target_arch = "x86_64")]
                $crate::ops::cpu::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::ops::cpu::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(super) use per_isa;
