//! `shift.cu`: whole pages written from others with their keys at other positions.

use nuthatch_backend::{DeviceError, RopeStyle};
use nuthatch_types::PageShift;

use super::{Address, count, params};
use crate::device::Device;
use crate::kv::CudaKv;
use crate::plan::CudaPlan;

params! {
    /// Mirrors `Shift`.
    Shift {
        source: u32,
        target: u32,
        is_turned: u32,
        padding: u32,
    }
}

params! {
    /// Mirrors `ShiftParams`.
    ShiftParams {
        arena: Address,
        shifts: Address,
        turns: Address,
        head_bytes: u64,
        n_shifts: u32,
        half: u32,
        is_halves: u32,
        padding: u32,
    }
}

const THREADS: u32 = 256;

/// Writes pages in order, all layers and heads.
pub(crate) fn shift_pages(
    device: &Device,
    plan: &CudaPlan,
    kv: &mut CudaKv,
    shifts: &[PageShift],
) -> Result<(), DeviceError> {
    const WHAT: &str = "a list of shifts";
    if shifts.is_empty() {
        return Ok(());
    }
    let in_arena = |shift: &PageShift| shift.source.0.max(shift.target.0) < kv.slots.device;
    assert!(shifts.iter().all(in_arena), "slots of the arena");
    assert!(plan.shape.kv == kv.shape, "the plan is for this arena");
    let rope = &plan.shape.rope;
    assert!(rope.inv_freq.len() * 2 <= kv.page.head_dim as usize, "no more than there is");
    let list: Vec<Shift> = shifts.iter().map(shift_of).collect();
    // Worked out here, where sines of large angles are exact.
    let turns: Vec<[f32; 2]> = shifts
        .iter()
        .flat_map(|shift| rope.inv_freq.iter().map(|&inv_freq| turn_of(shift.by, inv_freq)))
        .collect();
    let on_device = device.alloc(size_of_val(&list[..]), WHAT)?;
    device.upload(&on_device, 0, &list)?;
    let turns_on_device = device.alloc(size_of_val(&turns[..]), WHAT)?;
    device.upload(&turns_on_device, 0, &turns)?;
    let params = ShiftParams {
        arena: 0,
        shifts: on_device.address(),
        turns: turns_on_device.address(),
        head_bytes: 0,
        n_shifts: count(list.len()),
        half: count(rope.inv_freq.len()),
        is_halves: u32::from(rope.style == RopeStyle::Halves),
        padding: 0,
    };
    for run in kv.runs() {
        let head_bytes = run.page.bytes() as u64 * u64::from(kv.slots.device);
        let params = ShiftParams { arena: run.address, head_bytes, ..params };
        let kernel = &plan.kernels_of(kv, run.page).shift;
        #[expect(unsafe_code, reason = "a kernel")]
        // SAFETY: block `i` touches the asserted slots of head `i` of the run. The lists are freed after
        // the kernel has run, because freeing waits.
        unsafe { device.launch(kernel, (count(run.n), 1), THREADS, &params) }?;
    }
    kv.forget_near(device, shifts.iter().map(|shift| shift.target))
}

fn shift_of(shift: &PageShift) -> Shift {
    let (source, target) = (shift.source.0, shift.target.0);
    Shift { source, target, is_turned: u32::from(shift.by != 0), padding: 0 }
}

fn turn_of(by: i32, inv_freq: f32) -> [f32; 2] {
    let (sin, cos) = (f64::from(by) * f64::from(inv_freq)).sin_cos();
    [cos as f32, sin as f32]
}
