//! Pages that leave the device between two plans, for slower tiers.

use std::sync::Arc;

use nuthatch_backend::{DeviceError, PageCodec, RowMover};
use nuthatch_types::{ColdKv, LayerIdx, PageImage, Slot};

/// What holds pages whose bytes can be taken out and put back. Where nothing says otherwise, they
/// cannot.
pub trait Pages {
    /// How a page's bytes lie when they leave the device; `None` where they cannot.
    fn page_image(&self) -> Option<PageImage> {
        None
    }

    /// What turns pages into fewer bits and back; `None` where nothing does.
    fn page_codec(&self, cold: &ColdKv) -> Option<Arc<dyn PageCodec>> {
        let _ = cold;
        None
    }

    /// What makes pages of rows of others; `None` where nothing does.
    fn row_mover(&self) -> Option<RowMover> {
        None
    }

    /// Copies a page's bytes from a slot, and waits for the end.
    fn read_page(&mut self, slot: Slot, target: &mut [u8]) -> Result<(), DeviceError> {
        let _ = (slot, target);
        Err(DeviceError::Fault("pages do not leave this device".to_owned()))
    }

    /// Copies a page's bytes to a slot, or those of some layers, which begin at the byte `start`.
    fn write_page(&mut self, slot: Slot, start: usize, source: &[u8]) -> Result<(), DeviceError> {
        let _ = (slot, start, source);
        Err(DeviceError::Fault("pages do not leave this device".to_owned()))
    }
}

/// Writes to the page of a slot, from a byte of it on.
pub type WritePage<'a> = dyn FnMut(Slot, usize, &[u8]) -> Result<(), DeviceError> + 'a;

/// Pages that come, layer by layer, while a pass runs that needs them.
pub trait Arrivals {
    /// Waits until all pages have this layer, and writes what comes; false if it does not come.
    fn await_layer(
        &mut self,
        layer: LayerIdx,
        write: &mut WritePage<'_>,
    ) -> Result<bool, DeviceError>;
}
