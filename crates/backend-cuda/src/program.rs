//! The programs: which kernel sources go together, and the constants that both sides agree on.
//!
//! A program is one compilation. Operations without parameters of their own are one program; each
//! weight type has one, compiled when the first weight of it is loaded; each pair of KV type and
//! head width has one, compiled when it is first planned for.

use nuthatch_backend::WeightType;
use nuthatch_types::KvDtype;

use crate::kv::PageShape;
use crate::launch::{attend, copy, embed, gather, matmul, norm, pack, rope, round, swiglu};

/// One compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// A name for files and errors.
    pub(crate) name: String,
    /// Everything: constants, shared code, kernels.
    pub(crate) source: String,
}

const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

impl Program {
    /// A program of some files, with constants in front of them.
    fn new(name: String, constants: &[(&str, String)], files: &[(&str, &str)]) -> Self {
        let mut source = String::new();
        for (key, value) in constants {
            source.push_str(&format!("#define {key} {value}\n"));
        }
        for (file, text) in [("prelude.cuh", PRELUDE)].iter().chain(files) {
            // Errors name the file and line that a person edits.
            source.push_str(&format!("#line 1 \"{file}\"\n{text}"));
        }
        Program { name, source }
    }

    /// The operations that every model needs.
    pub(crate) fn common() -> Self {
        let constants = [
            ("NORM_PARAMS_SIZE", size_of::<norm::NormParams>().to_string()),
            ("SWIGLU_PARAMS_SIZE", size_of::<swiglu::SwigluParams>().to_string()),
            ("ROUND_PARAMS_SIZE", size_of::<round::RoundParams>().to_string()),
            ("SUM_PARAMS_SIZE", size_of::<round::SumParams>().to_string()),
            ("GATHER_PARAMS_SIZE", size_of::<gather::GatherParams>().to_string()),
            ("COPY_PARAMS_SIZE", size_of::<copy::CopyParams>().to_string()),
            ("ANGLES_PARAMS_SIZE", size_of::<rope::AnglesParams>().to_string()),
            ("MATMUL_F32_PARAMS_SIZE", size_of::<matmul::MatmulF32Params>().to_string()),
            ("EMBED_F32_PARAMS_SIZE", size_of::<embed::EmbedF32Params>().to_string()),
        ];
        let files = [
            ("norm.cu", include_str!("../kernels/norm.cu")),
            ("swiglu.cu", include_str!("../kernels/swiglu.cu")),
            ("round.cu", include_str!("../kernels/round.cu")),
            ("gather.cu", include_str!("../kernels/gather.cu")),
            ("copy.cu", include_str!("../kernels/copy.cu")),
            ("angles.cu", include_str!("../kernels/angles.cu")),
            ("matmul_f32.cu", include_str!("../kernels/matmul_f32.cu")),
        ];
        Program::new("common".into(), &constants, &files)
    }

    /// Products, packing and decoding of one weight type; `F32` is in the common ones.
    pub(crate) fn weights(dtype: WeightType) -> Self {
        let constants = [
            ("TYPE", dtype.to_string()),
            ("CELL_BYTES", matmul::cell_bytes(dtype).to_string()),
            ("SEGMENTS", matmul::SEGMENTS.to_string()),
            ("MATMUL_ENTRIES", matmul::entries(dtype)),
            ("MATMUL_PARAMS_SIZE", size_of::<matmul::MatmulParams>().to_string()),
            ("PACK_PARAMS_SIZE", size_of::<pack::PackParams>().to_string()),
            ("EMBED_PARAMS_SIZE", size_of::<embed::EmbedParams>().to_string()),
        ];
        let files = [
            ("weights.cuh", include_str!("../kernels/weights.cuh")),
            ("pack.cu", include_str!("../kernels/pack.cu")),
            ("embed.cu", include_str!("../kernels/embed.cu")),
            ("matmul.cu", include_str!("../kernels/matmul.cu")),
        ];
        Program::new(format!("weights-{dtype}"), &constants, &files)
    }

    /// Appending and attending for one KV type and head width.
    pub(crate) fn attention(page: PageShape) -> Self {
        let (kv, files) = match page.dtype {
            KvDtype::F32 => ("KV_F32", ("attend_f32.cu", include_str!("../kernels/attend_f32.cu"))),
            KvDtype::F16 => ("KV_F16", ("attend.cu", include_str!("../kernels/attend.cu"))),
            KvDtype::Bf16 => ("KV_BF16", ("attend.cu", include_str!("../kernels/attend.cu"))),
        };
        let constants = [
            ("KV", kv.to_owned()),
            ("HEAD_DIM", page.head_dim.to_string()),
            ("HEAD_PAGE_BYTES", page.bytes().to_string()),
            ("SPLIT_STAGES", attend::SPLIT.stages.to_string()),
            ("SPLIT_SHARED", attend::SPLIT.shared_bytes(page).to_string()),
            ("TILE_STAGES", attend::TILE.stages.to_string()),
            ("TILE_SHARED", attend::TILE.shared_bytes(page).to_string()),
            ("ROPE_PARAMS_SIZE", size_of::<rope::RopeParams>().to_string()),
            ("TASK_SIZE", size_of::<attend::Task>().to_string()),
            ("ATTEND_PARAMS_SIZE", size_of::<attend::AttendParams>().to_string()),
            ("MERGE_SIZE", size_of::<attend::Merge>().to_string()),
            ("MERGE_PARAMS_SIZE", size_of::<attend::MergeParams>().to_string()),
            ("ATTEND_F32_PARAMS_SIZE", size_of::<attend::AttendF32Params>().to_string()),
        ];
        let files = [
            ("kv.cuh", include_str!("../kernels/kv.cuh")),
            ("rope.cu", include_str!("../kernels/rope.cu")),
            files,
        ];
        Program::new(format!("attention-{}-{}", page.dtype, page.head_dim), &constants, &files)
    }

    /// Every program, with the head widths that models have, to see that all of them compile.
    pub(crate) fn all() -> Vec<Self> {
        let mut programs = vec![Program::common()];
        let packed = WeightType::ALL.into_iter().filter(|&dtype| dtype != WeightType::F32);
        programs.extend(packed.map(Program::weights));
        for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
            for head_dim in [32, 64, 80, 96, 128, 256] {
                programs.push(Program::attention(PageShape { dtype, head_dim }));
            }
        }
        programs
    }
}
