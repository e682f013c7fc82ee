//! Keys and values of all layers and lanes (decision D6).
//!
//! One K and one V tensor per layer, [row, slots * lanes + 1]: a lane owns `slots` consecutive rows; the last row takes what
//! nobody may read (padding rows, idle lanes). Layers that see the whole context store position p in slot p. Sliding layers
//! keep a ring: position p in slot p mod ring. The ring holds the window, and behind it one canvas or one prefill chunk.

use crate::error::{Error, Result};
use crate::ggml::{Context, Device, GgmlType, Handle, Store, Tensor, row_bytes};
use crate::model::layers::Attention;

/// What a family says of one layer's cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheLayer {
    pub head: usize,
    pub kv_heads: usize,
    /// Sliding window in tokens; `None` sees everything.
    pub window: Option<usize>,
}

/// Sizes that a cache is made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheSize {
    pub context: usize,
    pub lanes: usize,
    pub canvas: usize,
    /// Most rows of one lane in one prefill pass.
    pub chunk: usize,
    /// Key counts are multiples of this.
    pub padding: usize,
    pub ty: GgmlType,
    /// Read and written by the CUDA kernels, which leave out a negative slot.
    pub on_device: bool,
}

struct Layer {
    key: Handle,
    value: Handle,
    ring: bool,
}

/// A lane's fill.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Fill {
    /// Positions 0..filled are valid.
    filled: usize,
    /// Positions 0..written have been written at some time: older ring slots are gone.
    written: usize,
}

pub(crate) struct Cache {
    layers: Vec<Layer>,
    fills: Vec<Fill>,
    size: CacheSize,
    /// The widest sliding window.
    window: Option<usize>,
    /// Slots per lane: whole-context layers and ring layers.
    slots: [usize; 2],
    store: Store,
}

impl Cache {
    /// Lays the cache out, each layer on the device that `place` says; `allocate` gives it memory.
    pub fn new(
        layers: &[CacheLayer],
        size: CacheSize,
        devices: &[Device],
        place: impl Fn(usize) -> Device,
    ) -> Result<Self> {
        let window = layers.iter().filter_map(|l| l.window).max();
        let pad = |n: usize| n.next_multiple_of(size.padding);
        let whole = pad(size.context);
        let ring = window.map_or(whole, |w| pad(w - 1 + size.canvas.max(size.chunk)).min(whole));
        let slots = [whole, ring];
        let store = Store::new(devices, 2 * layers.len())?;
        let layers = layers
            .iter()
            .enumerate()
            .map(|(i, layer)| {
                let row = layer.head * layer.kv_heads;
                if !row.is_multiple_of(size.ty.block_size() as usize)
                    || !layer.head.is_multiple_of(size.ty.block_size() as usize)
                {
                    return Err(Error::argument(
                        "kv",
                        format!("{} blocks do not divide a head of {}", size.ty.name(), layer.head),
                    ));
                }
                let ring = layer.window.is_some();
                let rows = slots[usize::from(ring)] * size.lanes + 1;
                let context = store.context(place(i));
                let make = |what| {
                    context.named(context.new_tensor(size.ty, &[row, rows]), &format!("cache_{what}.{i}")).handle()
                };
                Ok(Layer { key: make("k"), value: make("v"), ring })
            })
            .collect::<Result<_>>()?;
        Ok(Self { layers, fills: vec![Fill::default(); size.lanes], size, window, slots, store })
    }

    /// Bytes that `allocate` takes on a device.
    pub fn bytes(&self, device: Device) -> u64 {
        self.store.bytes(device)
    }

    pub fn allocate(&mut self) -> Result<()> {
        self.store.allocate("the key-value cache")
    }

    /// For a memory measurement only.
    pub fn pretend_allocated(&mut self) -> Result<()> {
        self.store.pretend_allocated(false)
    }

    pub fn is_ring(&self, layer: usize) -> bool {
        self.layers[layer].ring
    }

    /// Key and value tensors of a layer, [row, slots * lanes + 1].
    pub fn tensors(&self, layer: usize) -> [Tensor<'_>; 2] {
        [self.store.tensor(self.layers[layer].key), self.store.tensor(self.layers[layer].value)]
    }

    /// The first `keys` slots of some lanes as attention wants them, [d, keys, kv heads, lanes].
    pub fn window<'c>(
        &self,
        cx: &'c Context,
        t: Tensor<'c>,
        a: &Attention,
        lane: usize,
        lanes: usize,
        keys: usize,
    ) -> Tensor<'c> {
        let slots = self.slots[usize::from(self.layers[a.layer].ring)];
        let row = t.strides()[1];
        cx.view(t, [a.head, keys, a.kv_heads, lanes], [row, row_bytes(t.ty(), a.head), slots * row], lane * slots * row)
    }

    pub fn filled(&self, lane: usize) -> usize {
        self.fills[lane].filled
    }

    /// Notes that `rows` positions behind `filled` are being written; `keep` makes them valid.
    pub fn note_written(&mut self, lane: usize, rows: usize, keep: bool) {
        let fill = &mut self.fills[lane];
        fill.written = fill.written.max(fill.filled + rows);
        if keep {
            fill.filled += rows;
        }
    }

    /// Forgets positions from `len` on; see `Forward::truncate`.
    pub fn truncate(&mut self, lane: usize, len: usize) -> usize {
        let ring = self.slots[1];
        let fill = &mut self.fills[lane];
        let len = len.min(fill.filled);
        // A query at `len` sees window - 1 older positions; the ring has lost all below written - ring.
        let oldest_needed = self.window.map_or(usize::MAX, |w| len.saturating_sub(w - 1));
        let oldest_left = fill.written.saturating_sub(ring);
        if oldest_needed >= oldest_left && len > 0 {
            fill.filled = len;
        } else {
            *fill = Fill::default();
        }
        fill.filled
    }

    /// Copies the first `len` positions of a lane to another; see `Forward::copy_prefix`.
    pub fn copy_prefix(&mut self, from: usize, to: usize, len: usize) -> usize {
        let source = self.fills[from];
        // What `truncate` would have to forget cannot be handed on either.
        let oldest_needed = self.window.map_or(usize::MAX, |w| len.saturating_sub(w - 1));
        if from == to || len == 0 || len > source.filled || oldest_needed < source.written.saturating_sub(self.slots[1])
        {
            return self.fills[to].filled;
        }
        for layer in 0..self.layers.len() {
            let slots = self.slots[usize::from(self.is_ring(layer))];
            // Of a ring everything: it holds the last positions wherever they lie.
            let rows = if self.is_ring(layer) { slots.min(source.written) } else { len };
            for tensor in self.tensors(layer) {
                tensor.copy_rows(from * slots, to * slots, rows);
            }
        }
        self.fills[to] = Fill { filled: len, written: source.written };
        len
    }

    /// Keys that attention visits when the last written position of any lane is `last`.
    pub fn keys(&self, last: usize) -> [usize; 2] {
        let used = (last + 1).next_multiple_of(self.size.padding);
        self.slots.map(|slots| used.min(slots))
    }

    /// Keys at the end of the context: the largest graph.
    pub fn most_keys(&self) -> [usize; 2] {
        self.slots
    }

    /// Row of the cache tensors that takes position `position` of a lane.
    pub fn slot(&self, ring: usize, lane: usize, position: usize) -> i64 {
        (lane * self.slots[ring] + position % self.slots[ring]) as i64
    }

    /// Where a padding row's keys go: to a row that nobody reads, or, by the CUDA kernels, nowhere.
    pub fn nowhere(&self, ring: usize) -> i64 {
        if self.size.on_device { -1 } else { (self.size.lanes * self.slots[ring]) as i64 }
    }

    /// Whether the CUDA kernels read and write this cache.
    pub fn on_device(&self) -> bool {
        self.size.on_device
    }

    /// The position that a slot holds once `last` is the last written one; `None` if it holds none yet.
    pub fn position_in(&self, ring: usize, slot: usize, last: usize) -> Option<usize> {
        let slots = self.slots[ring];
        let behind = (last % slots + slots - slot) % slots; // how far the slot lies behind `last`
        last.checked_sub(behind)
    }

    pub fn sliding_window(&self) -> Option<usize> {
        self.window
    }

    /// Positions below `len` that a layer still holds.
    #[cfg(feature = "cli")]
    pub fn held(&self, layer: usize, lane: usize, len: usize) -> std::ops::Range<usize> {
        let slots = self.slots[usize::from(self.is_ring(layer))];
        self.fills[lane].written.saturating_sub(slots).min(len)..len
    }

    /// Reads keys (0) or values (1) of a layer at a position, as F32, [kv heads * head].
    #[cfg(any(test, feature = "cli"))]
    pub fn read(&self, layer: usize, which: usize, lane: usize, position: usize) -> Result<Vec<f32>> {
        let t = self.tensors(layer)[which];
        let row = t.strides()[1];
        let slot = self.slot(usize::from(self.is_ring(layer)), lane, position) as usize;
        let raw: Vec<u8> = t.read_at(slot * row, row);
        let mut out = vec![0.0; t.shape()[0]];
        crate::ggml::dequantize(t.ty(), &raw, &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(context: usize, window: usize, canvas: usize, chunk: usize) -> Cache {
        let layers = [
            CacheLayer { head: 4, kv_heads: 1, window: Some(window) },
            CacheLayer { head: 4, kv_heads: 1, window: None },
        ];
        let size = CacheSize { context, lanes: 2, canvas, chunk, padding: 8, ty: GgmlType::F32, on_device: false };
        let cpu = Device::cpu().unwrap();
        Cache::new(&layers, size, &[cpu], |_| cpu).unwrap()
    }

    #[test]
    fn the_ring_holds_window_and_canvas() {
        let c = cache(256, 6, 8, 4);
        assert_eq!(c.most_keys(), [256, 16]); // 5 + 8 = 13, padded to 16
        assert_eq!(c.keys(3), [8, 8]);
        assert_eq!(c.keys(30), [32, 16]);
        assert_eq!(c.slot(1, 1, 18), 16 + 2);
        assert_eq!(c.position_in(1, 2, 18), Some(18));
        assert_eq!(c.position_in(1, 3, 18), Some(3));
        assert_eq!(c.position_in(1, 3, 2), None);
    }

    #[test]
    fn a_prefix_is_copied_with_what_the_ring_holds_of_it() {
        let mut c = cache(256, 6, 8, 4);
        c.allocate().unwrap();
        for (layer, slots) in [(0, 16), (1, 256)] {
            for tensor in c.tensors(layer) {
                let values: Vec<f32> = (0..tensor.elements()).map(|i| (i / 4) as f32).collect();
                tensor.write(&values);
                assert_eq!(tensor.shape(), [4, 2 * slots + 1, 1, 1]);
            }
        }
        c.note_written(0, 20, true);
        assert_eq!(c.copy_prefix(0, 1, 19), 19);
        assert_eq!(c.filled(1), 19);
        for position in 14..19 {
            for layer in [0, 1] {
                let [from, to] = [0, 1].map(|lane| c.read(layer, 1, lane, position).unwrap());
                assert_eq!(from, to, "layer {layer}, position {position}");
            }
        }
        c.note_written(0, 8, false); // positions below 12 are gone from the ring
        assert_eq!(c.copy_prefix(0, 1, 16), 19, "a query at 16 needs position 11: nothing is copied");
        assert_eq!(c.copy_prefix(0, 1, 21), 19, "more than there is");
    }

    #[test]
    fn truncate_keeps_what_the_ring_still_has() {
        let mut c = cache(256, 6, 8, 4);
        c.note_written(0, 20, true);
        c.note_written(0, 8, false); // a canvas at 20..28: positions below 12 are gone
        assert_eq!(c.truncate(0, 19), 19);
        assert_eq!(c.truncate(0, 17), 17);
        assert_eq!(c.truncate(0, 16), 0, "a query at 16 needs position 11");
        assert_eq!(c.filled(1), 0);
    }
}
