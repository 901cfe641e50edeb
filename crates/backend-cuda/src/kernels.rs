//! Kernels that are loaded when they are first needed.

use std::sync::{Arc, PoisonError};

use nuthatch_backend::{DeviceError, WeightType};
use nuthatch_types::{KvDtype, KvShape};

use crate::Cuda;
use crate::device::Device;
use crate::kv::PageShape;
use crate::launch::attend::{Attend, AttendKernels, Paced, Tile};
use crate::launch::attend_shape::{AttendShape, PacedShape, SplitShape};
use crate::launch::merge::{MergeShape, TurnShape};
use crate::program::Program;
use crate::weight::{Kernels, WeightKernels};

impl Cuda {
    pub(crate) fn weight_kernels(&self, dtype: WeightType) -> Result<Kernels, DeviceError> {
        if dtype == WeightType::F32 {
            return Ok(Kernels::F32(Arc::clone(&self.common)));
        }
        let mut known = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = known.get(&dtype) {
            return Ok(Kernels::Packed(Arc::clone(kernels)));
        }
        let cubin = self.cubin(&Program::weights(dtype))?;
        let kernels = Arc::new(WeightKernels::new(&self.device, cubin, dtype)?);
        known.insert(dtype, Arc::clone(&kernels));
        Ok(Kernels::Packed(kernels))
    }

    pub(crate) fn attend_kernels(
        &self,
        page: PageShape,
        by_rows: bool,
    ) -> Result<Arc<AttendKernels>, DeviceError> {
        let mut known = self.attention.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = known.get(&(page, by_rows)) {
            return Ok(Arc::clone(kernels));
        }
        let attend = AttendShape { by_rows, ..AttendShape::new(page, self.is_exact) };
        let splits = SplitShape::fitting(attend, self.device.shared_bytes_max());
        let cubin = self.cubin(&Program::attention(attend, splits))?;
        let kernels = Arc::new(AttendKernels::new(&self.device, cubin, (attend, splits))?);
        known.insert((page, by_rows), Arc::clone(&kernels));
        Ok(kernels)
    }

    /// The kernels for each kind of pages.
    pub(crate) fn plan_kernels(
        &self,
        kv: &KvShape,
    ) -> Result<Vec<(PageShape, Arc<AttendKernels>)>, DeviceError> {
        let pages = PageShape::all(kv).into_iter();
        pages.map(|page| Ok((page, self.attend_kernels(page, false)?))).collect()
    }

    pub(crate) fn cubin(&self, program: &Program) -> Result<Vec<u8>, DeviceError> {
        self.compiler.cubin(program).map_err(|e| DeviceError::Fault(e.to_string()))
    }
}

impl AttendKernels {
    fn new(
        device: &Device,
        cubin: Vec<u8>,
        (attend, [small, large]): (AttendShape, [SplitShape; 2]),
    ) -> Result<Self, DeviceError> {
        let module = device.load(cubin)?;
        let kernel = |name, shared| device.kernel(&module, name, shared);
        let split = |shape: SplitShape| {
            Ok::<_, DeviceError>((shape, kernel(shape.name(), shape.shared_bytes(attend))?))
        };
        let merge = |shape: MergeShape| kernel(shape.name, shape.shared_bytes());
        let [a, b, c, d] = MergeShape::ALL;
        let capability = device.describe().1.0;
        let shape = attend.tile(capability);
        let fits = |shape: PacedShape| shape.shared_bytes(attend) <= device.shared_bytes_max();
        let has_paced = capability >= 9 && PacedShape::is_for(attend);
        let paced = match has_paced && PacedShape::ALL.into_iter().all(fits) {
            true => {
                let [a, b, c, d] = TurnShape::ALL.map(|shape| kernel(shape.name, 0));
                let split = |shape: PacedShape| kernel(shape.name, shape.shared_bytes(attend));
                let [few, more, many] = PacedShape::ALL.map(split);
                Some(Paced { kernels: [few?, more?, many?], merges: [a?, b?, c?, d?] })
            }
            false => None,
        };
        let attend = match attend.page.dtype {
            KvDtype::F32 => Attend::F32(kernel("attend_f32", 0)?),
            KvDtype::F16 | KvDtype::Bf16 | KvDtype::Int8(_) | KvDtype::Fp8(_) => Attend::Mma {
                splits: [split(small)?, split(large)?],
                tile: Tile { kernel: kernel(shape.name, shape.shared_bytes)?, shape },
                merges: [merge(a)?, merge(b)?, merge(c)?, merge(d)?],
                paced,
            },
        };
        Ok(AttendKernels {
            rope: kernel("rope_append", 0)?,
            write_far: kernel("write_far", 0)?,
            code_pages: kernel("code_pages", 0)?,
            shift: kernel("shift_pages", 0)?,
            attend,
        })
    }
}
