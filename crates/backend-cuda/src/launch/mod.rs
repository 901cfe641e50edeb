//! Queuing kernels: one file per operation, each with the parameters that its `.cu` file mirrors,
//! the checks of every shape, and the launch.

pub(crate) mod attend;
pub(crate) mod attend_shape;
pub(crate) mod copy;
pub(crate) mod draw;
pub(crate) mod embed;
pub(crate) mod gather;
pub(crate) mod matmul;
pub(crate) mod matmul_one;
pub(crate) mod matmul_wide;
pub(crate) mod merge;
pub(crate) mod norm;
pub(crate) mod pack;
pub(crate) mod roof;
pub(crate) mod rope;
pub(crate) mod round;
pub(crate) mod shift;
pub(crate) mod sparse;
pub(crate) mod sparse_attend;
pub(crate) mod sparse_score;
pub(crate) mod swiglu;

/// Declares the parameters of a kernel: plain data of the same layout on both sides.
macro_rules! params {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: $type,)*
        }

        #[expect(unsafe_code, reason = "the bytes of a kernel's parameters")]
        // SAFETY: plain data with C layout; the kernel asserts that its size is the same.
        unsafe impl cudarc::driver::DeviceRepr for $name {}
    };
}
pub(crate) use params;

params! {
    /// Mirrors `Near`: copies of pages that are far; all zero if none is.
    NearPages {
        frames: Address,
        layer: Address,
        head_bytes: u64,
    }
}

impl NearPages {
    /// No page has a copy.
    pub(crate) const NONE: NearPages = NearPages { frames: 0, layer: 0, head_bytes: 0 };
}

params! {
    /// Mirrors `Codes`: rows in eight bits beside pages that are far; all zero if there are none.
    CodeRows {
        /// Where the rows of each head are.
        rows: Address,
        scales: Address,
        n_slots: u64,
        kind: u32,
        /// Whether they stay so in working sets.
        are_kept: u32,
    }
}

impl CodeRows {
    /// There are none.
    pub(crate) const NONE: Self = CodeRows { rows: 0, scales: 0, n_slots: 0, kind: 0, are_kept: 0 };
}

/// An address in device memory.
pub(crate) type Address = u64;

/// A size as the kernels count.
pub(crate) fn count(n: usize) -> u32 {
    u32::try_from(n).expect("sizes of one step fit 32 bits")
}
