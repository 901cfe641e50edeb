//! Attention of one row of each sequence, beside a plain read of as many bytes.

use std::error::Error;

use nuthatch_backend::{Backend as _, Pass};
use nuthatch_backend_cuda::Cuda;
use nuthatch_types::{KvDtype, KvShape};

use crate::rig::Rig;
use crate::{N_LAYERS, Outcome, Report, number, time};

/// Bytes that the layers of an arena have together, at least: far more than the second-level cache.
const LAYERS_BYTES: usize = 400 << 20;
/// Plain reads of more are as fast as the roof.
const PLAIN_BYTES_MAX: usize = 512 << 20;

/// Query heads, KV heads, width and type.
type Heads = (u32, u32, u32, KvDtype);

/// All shapes, or few of them.
pub(crate) fn decodes(cuda: &Cuda, report: &mut Report, words: &[String]) -> Outcome {
    use KvDtype::{Bf16, F16};
    let mut decode = |heads, batches: &[_]| decode(cuda, report, heads, (batches, words));
    if words.iter().any(|word| word == "short") {
        return decode((32, 8, 128, F16), &[(1, 32768), (1, 131_072), (32, 8192)]);
    }
    let all = [(1, 1024), (1, 8192), (1, 32768), (1, 131_072), (8, 8192), (32, 8192), (32, 32768)];
    let long = [(1, 8192), (1, 32768), (1, 131_072), (32, 8192), (32, 32768)];
    decode((32, 8, 128, F16), &all)?;
    decode((32, 8, 128, Bf16), &long)?;
    decode((40, 8, 128, F16), &long)?;
    decode((28, 4, 128, F16), &long)?;
    decode((32, 32, 128, F16), &long)?;
    decode((9, 3, 64, F16), &long)
}

/// Layers of a model with so many heads.
fn n_layers_of(n_heads: u32) -> u32 {
    match n_heads {
        9 => 30,
        28 => 28,
        40 => 48,
        _ => 32,
    }
}

/// One shape.
pub(crate) fn decode(
    cuda: &Cuda,
    report: &mut Report,
    (n_heads, n_kv_heads, d, dtype): Heads,
    (batches, words): (&[(usize, usize)], &[String]),
) -> Outcome {
    let is_ordered = words.iter().any(|word| word == "ordered");
    for &(n_seqs, depth) in batches {
        let layer = KvShape { n_layers: 1, n_kv_heads, head_dim: d, page_len: 16, dtype };
        let bytes = n_seqs * depth * layer.token_bytes();
        let n_layers = LAYERS_BYTES.div_ceil(bytes) as u32;
        let kv = KvShape { n_layers: n_layers.next_multiple_of(2).clamp(N_LAYERS, 64), ..layer };
        let mut rig = Rig::with(cuda, (kv, n_heads), (n_seqs, depth, 1), (is_ordered, None))?;
        let parts: Vec<_> = (0..rig.n_seqs).map(|seq| (seq, depth - 1, 1)).collect();
        rig.lay_out(&parts)?;
        let of_model = n_layers_of(n_heads).max(kv.n_layers);
        let n_passed = number(words, "layers").map_or(of_model, |n| n.max(1) as u32);
        let seconds = rig.time_layers(n_seqs, n_passed)?;
        let group = n_heads / n_kv_heads;
        let order = match (is_ordered, cuda.has_virtual_kv()) {
            (_, true) => ", virtual",
            (true, false) => ", ordered",
            (false, false) => "",
        };
        let name =
            format!("decode {dtype} d {d} {n_heads}:{n_kv_heads}, {n_seqs} x {depth}{order}");
        rig.renew_plan()?;
        rig.lay_out(&parts)?;
        let plain = plain(cuda, report, &mut rig, (bytes, n_passed))?;
        let (bytes, operations) = (bytes as f64, 2.0 * f64::from(group) * bytes as f64);
        report.add_beside(&name, seconds, (bytes, operations), plain);
    }
    Ok(())
}

/// Seconds of a plain read of so many bytes, of so many that follow each other in a recorded pass; what the
/// roof is for many.
fn plain(
    cuda: &Cuda,
    report: &mut Report,
    rig: &mut Rig<'_>,
    (bytes, n_passed): (usize, u32),
) -> Result<Option<f64>, Box<dyn Error>> {
    if bytes > PLAIN_BYTES_MAX {
        return Ok(None);
    }
    if let Some((_, seconds)) = report.plain.iter().find(|(known, _)| *known == bytes) {
        return Ok(Some(*seconds));
    }
    let n_sources = LAYERS_BYTES.div_ceil(bytes).clamp(2, 64);
    let sources = (0..n_sources).map(|_| cuda.alloc(bytes / 4)).collect::<Result<Vec<_>, _>>()?;
    let mut out = cuda.alloc(1)?;
    let seconds = time(cuda, |_| {
        if cuda.begin_pass(&mut rig.plan, &rig.kv)? == Pass::Needed {
            for i in 0..n_passed as usize {
                cuda.read_all(&sources[i % n_sources], &mut out)?;
            }
            cuda.end_pass(&mut rig.plan)?;
        }
        Ok(())
    })?;
    let seconds = seconds / f64::from(n_passed);
    report.plain.push((bytes, seconds));
    report.add(&format!("plain read of {bytes} bytes"), seconds, bytes as f64, 0.0);
    Ok(Some(seconds))
}
