//! Which instructions the machine has, asked once.

#![expect(unsafe_code, reason = "permission for AMX tiles is a raw system call")]

use std::fmt;

/// A set of instructions that a kernel was written for; later ones include the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever every machine of the target has.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 (F, BW, VL, DQ) with VNNI.
    Avx512,
    /// AVX-512 and the int8 tiles of AMX.
    Amx,
}

impl Isa {
    /// All, for tests.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The best that this machine and its system allow.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            if avx512() {
                return if amx() { Isa::Amx } else { Isa::Avx512 };
            }
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                return Isa::Avx2;
            }
        }
        Isa::Scalar
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512-vnni",
            Isa::Amx => "amx-int8",
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("popcnt")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Whether the chip has int8 tiles and the system lets this process use their state.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // Leaf 7, EDX: bit 24 AMX-TILE, bit 25 AMX-INT8.
    let leaf = core::arch::x86_64::__cpuid_count(7, 0);
    if leaf.edx & (1 << 24) == 0 || leaf.edx & (1 << 25) == 0 {
        return false;
    }
    // SAFETY: the call only asks for permission for this process; it reads no memory of ours.
    let status =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    status == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx() -> bool {
    false
}
