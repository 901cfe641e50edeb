//! The programs: which kernel sources go together, and the constants that both sides agree on.
//!
//! A program is one compilation. Operations without parameters of their own are one program; each
//! weight type has one, compiled when the first weight of it is loaded; each pair of KV type and
//! head width has one, compiled when it is first planned for.

use nuthatch_backend::WeightType;
use nuthatch_types::{KvDtype, LayerSet};

use crate::branch::LinkTuning;
use crate::compile::Extent;
use crate::kv::PageShape;
use crate::launch::{
    attend, attend_shape, copy, draw, embed, gather, matmul, matmul_one, matmul_wide, merge, norm,
    pack, roof, rope, round, shift, sparse, swiglu,
};

/// One compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// A name for files and errors.
    pub(crate) name: String,
    /// Everything: constants, shared code, kernels.
    pub(crate) source: String,
}

/// What decides, which is compiled twice; `COMPACT` of `sparse_score.cuh` says why.
const DECIDE: [(&str, &str); 7] = [
    ("sparse_score.cuh", include_str!("../kernels/sparse_score.cuh")),
    ("sparse_piece.cuh", include_str!("../kernels/sparse_piece.cuh")),
    ("sparse_look.cuh", include_str!("../kernels/sparse_look.cuh")),
    ("sparse_share.cuh", include_str!("../kernels/sparse_share.cuh")),
    ("sparse_settle.cuh", include_str!("../kernels/sparse_settle.cuh")),
    ("sparse_move.cuh", include_str!("../kernels/sparse_move.cuh")),
    ("sparse_decide.cu", include_str!("../kernels/sparse_decide.cu")),
];

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
            ("LAND_PARAMS_SIZE", size_of::<copy::LandParams>().to_string()),
            ("FILL_PARAMS_SIZE", size_of::<copy::FillParams>().to_string()),
            ("DRAW_SIZE", size_of::<draw::DrawRow>().to_string()),
            ("MOVED_SIZE", size_of::<draw::MovedToken>().to_string()),
            ("DRAW_PARAMS_SIZE", size_of::<draw::DrawParams>().to_string()),
            ("ROOF_PARAMS_SIZE", size_of::<roof::RoofParams>().to_string()),
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
            ("draw.cu", include_str!("../kernels/draw.cu")),
            ("roof.cu", include_str!("../kernels/roof.cu")),
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
            ("ONE_ROW_BYTES", matmul_one::ROW_BYTES.to_string()),
            ("ONE_CELLS_BYTES", matmul_one::CELLS_BYTES.to_string()),
            ("ONE_PIECES", matmul_one::PIECES.to_string()),
            ("ONE_ENTRY", matmul_one::entry(dtype)),
            ("WIDE_ENTRIES", matmul_wide::entries(dtype)),
            ("WIDE_PARAMS_SIZE", size_of::<matmul_wide::WideParams>().to_string()),
            ("PACK_PARAMS_SIZE", size_of::<pack::PackParams>().to_string()),
            ("EMBED_PARAMS_SIZE", size_of::<embed::EmbedParams>().to_string()),
        ];
        let files = [
            ("weights.cuh", include_str!("../kernels/weights.cuh")),
            ("pack.cu", include_str!("../kernels/pack.cu")),
            ("embed.cu", include_str!("../kernels/embed.cu")),
            ("matmul.cuh", include_str!("../kernels/matmul.cuh")),
            ("matmul.cu", include_str!("../kernels/matmul.cu")),
            ("matmul_one.cu", include_str!("../kernels/matmul_one.cu")),
            ("hopper.cuh", include_str!("../kernels/hopper.cuh")),
            ("matmul_wide.cu", include_str!("../kernels/matmul_wide.cu")),
        ];
        Program::new(format!("weights-{dtype}"), &constants, &files)
    }

    /// Appending and attending for one KV type and head width.
    pub(crate) fn attention(
        attend: attend_shape::AttendShape,
        splits: [attend_shape::SplitShape; 2],
    ) -> Self {
        let attend_shape::AttendShape { page, parts, by_rows } = attend;
        let mut constants = page_constants(attend);
        constants.extend([
            ("SPLIT_ENTRIES", splits.map(|split| split.entry(attend)).join(" ")),
            ("TILE_STAGES", attend_shape::TILE_STAGES.to_string()),
            ("TILE_SHARED", attend.tile_shared_bytes().to_string()),
            ("WIDE_STAGES", attend_shape::WIDE_STAGES.to_string()),
            ("WIDE_SHARED", attend.wide_shared_bytes().to_string()),
            ("ROPE_PARAMS_SIZE", size_of::<rope::RopeParams>().to_string()),
            ("WRITE_FAR_PARAMS_SIZE", size_of::<rope::WriteFarParams>().to_string()),
            ("CODE_PAGES_PARAMS_SIZE", size_of::<rope::CodePagesParams>().to_string()),
            ("SHIFT_SIZE", size_of::<shift::Shift>().to_string()),
            ("SHIFT_PARAMS_SIZE", size_of::<shift::ShiftParams>().to_string()),
            ("TASK_SIZE", size_of::<attend::Task>().to_string()),
            ("PART_SIZE", size_of::<attend::Part>().to_string()),
            ("SPLIT_SIZE", size_of::<attend::Split>().to_string()),
            ("PACED_ENTRIES", attend_shape::PacedShape::entries(attend)),
            ("TURN_ENTRIES", merge::TurnShape::entries(attend)),
            ("MERGE_ENTRIES", merge::MergeShape::ALL.map(|merge| merge.entry()).join(" ")),
            ("MERGE_BATCH_FLOATS", merge::MergeShape::BATCH_FLOATS.to_string()),
            ("MERGE_PARAMS_SIZE", size_of::<merge::MergeParams>().to_string()),
            ("ATTEND_F32_PARAMS_SIZE", size_of::<attend::AttendF32Params>().to_string()),
        ]);
        let mut files = vec![
            ("kv.cuh", include_str!("../kernels/kv.cuh")),
            ("codes.cuh", include_str!("../kernels/codes.cuh")),
            ("rope.cu", include_str!("../kernels/rope.cu")),
            ("shift.cu", include_str!("../kernels/shift.cu")),
        ];
        match page.dtype {
            KvDtype::F32 => {
                files.push(("attend_f32.cu", include_str!("../kernels/attend_f32.cu")));
            }
            KvDtype::F16 | KvDtype::Bf16 | KvDtype::Int8(_) | KvDtype::Fp8(_) => files.extend([
                ("hopper.cuh", include_str!("../kernels/hopper.cuh")),
                ("attend.cuh", include_str!("../kernels/attend.cuh")),
                ("attend_coded.cuh", include_str!("../kernels/attend_coded.cuh")),
                ("attend_tile.cu", include_str!("../kernels/attend_tile.cu")),
                ("attend_wide.cu", include_str!("../kernels/attend_wide.cu")),
                ("attend_feed.cuh", include_str!("../kernels/attend_feed.cuh")),
                ("attend_split.cu", include_str!("../kernels/attend_split.cu")),
                ("attend_merge.cu", include_str!("../kernels/attend_merge.cu")),
                ("attend_paced.cu", include_str!("../kernels/attend_paced.cu")),
                ("attend_turns.cu", include_str!("../kernels/attend_turns.cu")),
            ]),
        }
        let rows = if by_rows { "-rows" } else { "" };
        let name = format!("attention-{}-{}-{parts}{rows}", page.dtype, page.head_dim);
        Program::new(name, &constants, &files)
    }

    /// Top-k attention for one KV type and head width, on a device with so much shared memory.
    pub(crate) fn sparse(
        attend: attend_shape::AttendShape,
        shared_bytes_max: usize,
        tuning: LinkTuning,
    ) -> Self {
        let attend_shape::AttendShape { page, parts, .. } = attend;
        let mut constants = page_constants(attend);
        constants.extend(sparse::constants(attend, shared_bytes_max, tuning));
        let mut files = vec![("kv.cuh", include_str!("../kernels/kv.cuh"))];
        if page.dtype != KvDtype::F32 {
            files.push(("attend.cuh", include_str!("../kernels/attend.cuh")));
        }
        files.extend([
            ("codes.cuh", include_str!("../kernels/codes.cuh")),
            ("sparse.cuh", include_str!("../kernels/sparse.cuh")),
            ("sparse_set.cuh", include_str!("../kernels/sparse_set.cuh")),
            ("sparse_digest.cu", include_str!("../kernels/sparse_digest.cu")),
        ]);
        files.extend(DECIDE);
        files.extend([
            ("sparse_score.cu", include_str!("../kernels/sparse_score.cu")),
            ("sparse_gather.cu", include_str!("../kernels/sparse_gather.cu")),
            ("sparse_post.cu", include_str!("../kernels/sparse_post.cu")),
        ]);
        if page.dtype != KvDtype::F32 {
            files.push(("sparse_page.cuh", include_str!("../kernels/sparse_page.cuh")));
        }
        files.extend([
            ("sparse_attend.cu", include_str!("../kernels/sparse_attend.cu")),
            ("compact", "#define COMPACT\nnamespace compact {\n"),
        ]);
        files.extend(DECIDE);
        files.push(("compact", "}\n"));
        Program::new(format!("sparse-{}-{}-{parts}", page.dtype, page.head_dim), &constants, &files)
    }

    /// The programs, for a device with so much shared memory.
    pub(crate) fn all(extent: Extent, shared_bytes_max: usize) -> Vec<Self> {
        use KvDtype::{Bf16, F16, F32};
        const INT8: KvDtype = KvDtype::Int8(LayerSet::NONE);
        const FP8: KvDtype = KvDtype::Fp8(LayerSet::NONE);
        const FEW: &[(KvDtype, u32)] = &[(F16, 128), (INT8, 64), (FP8, 128)];
        const USUAL: &[(KvDtype, u32)] =
            &[(F16, 64), (F16, 256), (Bf16, 128), (F32, 128), (INT8, 128), (FP8, 64)];
        const EVERY: &[(KvDtype, u32)] = &[
            (F16, 32),
            (F16, 80),
            (F16, 96),
            (Bf16, 24),
            (Bf16, 32),
            (Bf16, 64),
            (Bf16, 80),
            (Bf16, 256),
            (F32, 32),
            (F32, 64),
            (F32, 96),
            (INT8, 80),
            (FP8, 80),
        ];
        let packed = WeightType::ALL.into_iter().filter(|&dtype| dtype != WeightType::F32);
        let (weights, pages): (Vec<WeightType>, Vec<_>) = match extent {
            Extent::Few => (vec![WeightType::BF16], FEW.to_vec()),
            Extent::Usual => (packed.collect(), [FEW, USUAL].concat()),
            Extent::Every => (packed.collect(), [FEW, USUAL, EVERY].concat()),
        };
        let attention = |page: PageShape, is_exact: bool| {
            let usual = attend_shape::AttendShape::new(page, is_exact);
            let rows = attend_shape::AttendShape { by_rows: true, ..usual };
            let splits = attend_shape::SplitShape::fitting(usual, shared_bytes_max);
            let mut programs = vec![Program::attention(usual, splits)];
            if !page.dtype.is_coded() {
                programs.push(Program::attention(rows, splits));
                programs.push(Program::sparse(rows, shared_bytes_max, LinkTuning::default()));
            }
            programs
        };
        let mut programs = vec![Program::common()];
        programs.extend(weights.into_iter().map(Program::weights));
        for (dtype, head_dim) in pages {
            let page = PageShape { dtype, head_dim };
            programs.extend(attention(page, true));
            // Wider floats are never rounded.
            if dtype != F32 {
                programs.extend(attention(page, false));
            }
        }
        programs
    }
}

/// What every program about pages is told.
fn page_constants(attend: attend_shape::AttendShape) -> Vec<(&'static str, String)> {
    let attend_shape::AttendShape { page, parts, by_rows } = attend;
    let kv = match page.dtype {
        KvDtype::F32 => "KV_F32",
        KvDtype::F16 => "KV_F16",
        KvDtype::Bf16 => "KV_BF16",
        KvDtype::Int8(_) => "KV_INT8",
        KvDtype::Fp8(_) => "KV_FP8",
    };
    vec![
        ("KV", kv.to_owned()),
        ("HEAD_DIM", page.head_dim.to_string()),
        ("HEAD_PAGE_BYTES", page.bytes().to_string()),
        ("ROWS", u32::from(by_rows).to_string()),
        ("PARTS", parts.to_string()),
        ("SMALL_CHUNK", attend_shape::SMALL_CHUNK.to_string()),
        ("MIDDLE_CHUNK", attend_shape::MIDDLE_CHUNK.to_string()),
        ("LARGE_CHUNK", attend_shape::LARGE_CHUNK.to_string()),
        ("ATTEND_PARAMS_SIZE", size_of::<attend::AttendParams>().to_string()),
    ]
}
