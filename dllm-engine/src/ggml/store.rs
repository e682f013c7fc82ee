//! Tensors that stay, on one device or spread over several.

use crate::error::Result;
use crate::ggml::{Buffer, Context, Device, Handle, Tensor};

/// One device's part.
struct Place {
    // Dropped before the context, whose tensors lie in it.
    buffer: Option<Buffer>,
    context: Context,
    device: Device,
}

/// A context and a buffer for each device.
pub(crate) struct Store {
    places: Vec<Place>,
}

impl Store {
    /// Room for `tensors` descriptions on each device. There must be a device.
    pub fn new(devices: &[Device], tensors: usize) -> Result<Self> {
        assert!(!devices.is_empty(), "a store without a device");
        let place = |&device: &Device| Ok(Place { buffer: None, context: Context::new(tensors, 0)?, device });
        Ok(Self { places: devices.iter().map(place).collect::<Result<_>>()? })
    }

    /// Where descriptions of tensors on `device` are made, which must be one of the store's.
    pub fn context(&self, device: Device) -> &Context {
        match self.places.iter().find(|p| p.device == device) {
            Some(place) => &place.context,
            None => unreachable!("{} is not among the store's devices", device.name()),
        }
    }

    /// The first of its devices.
    pub fn main(&self) -> Device {
        self.places[0].device
    }

    /// The borrow for a stored handle of one of this store's tensors.
    pub fn tensor(&self, handle: Handle) -> Tensor<'_> {
        self.places[0].context.tensor(handle) // all contexts live equally long
    }

    /// Bytes that `allocate` takes on a device.
    pub fn bytes(&self, device: Device) -> u64 {
        self.places.iter().filter(|p| p.device == device).map(|p| Buffer::size_for_context(&p.context, device)).sum()
    }

    /// Gives memory to all tensors that have none, zeroed. `what` names it in an error.
    pub fn allocate(&mut self, what: &str) -> Result<()> {
        for place in &mut self.places {
            if Buffer::size_for_context(&place.context, place.device) > 0 {
                place.buffer = Some(Buffer::for_context(&place.context, place.device, what)?);
            }
        }
        Ok(())
    }

    /// Tells schedulers that the tensors are weights.
    pub fn mark_as_weights(&self) {
        self.places.iter().filter_map(|p| p.buffer.as_ref()).for_each(Buffer::mark_as_weights);
    }

    /// For a memory measurement only: makes all tensors look as if they lay on their devices.
    pub fn pretend_allocated(&mut self, weights: bool) -> Result<()> {
        for place in &mut self.places {
            let buffer = Buffer::empty(place.device)?;
            if weights {
                buffer.mark_as_weights();
            }
            place.context.tensors().for_each(|t| t.pretend_allocated(&buffer));
            place.buffer = Some(buffer);
        }
        Ok(())
    }
}
