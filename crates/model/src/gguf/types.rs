//! GGML's numbers for storage types.

use nuthatch_backend::WeightType;

/// The storage type with GGML's number `id`, or its name if it is not supported.
pub(super) fn weight_type(id: u32) -> Result<WeightType, String> {
    Ok(match id {
        0 => WeightType::F32,
        1 => WeightType::F16,
        2 => WeightType::Q4_0,
        3 => WeightType::Q4_1,
        6 => WeightType::Q5_0,
        7 => WeightType::Q5_1,
        8 => WeightType::Q8_0,
        10 => WeightType::Q2_K,
        11 => WeightType::Q3_K,
        12 => WeightType::Q4_K,
        13 => WeightType::Q5_K,
        14 => WeightType::Q6_K,
        30 => WeightType::BF16,
        _ => {
            return Err(match UNSUPPORTED.iter().find(|&&(number, _)| number == id) {
                Some(&(_, name)) => name.to_owned(),
                None => format!("number {id} (unknown)"),
            });
        }
    })
}

/// Types that GGML has and this engine does not read, so that errors can name them.
const UNSUPPORTED: [(u32, &str); 27] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];
