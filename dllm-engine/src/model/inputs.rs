//! Host inputs of a pass. They lie in a buffer of their own: ggml's allocator would reuse an ordinary input's memory after
//! its last use, and a replayed graph would read garbage.

use crate::error::Result;
use crate::ggml::{Buffer, Context, Device, GgmlType, Handle, Tensor};
use crate::model::cache::Cache;

/// F16 bits of a visible and of a hidden key in an attention mask.
const VISIBLE: u16 = 0;
const HIDDEN: u16 = 0xfc00; // minus infinity

/// Alignment of the parts of a step's numbers: what any GPU wants of a buffer's offset.
const STEP_ALIGN: usize = 256;

/// What a pass covers. One graph is built per key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PassKey {
    /// Causal (prefill and commit), else over canvases.
    pub encode: bool,
    pub lane: usize,
    pub lanes: usize,
    /// Rows of each lane; of a prefill, the padded number.
    pub rows: usize,
    pub keys: [usize; 2],
}

impl PassKey {
    pub fn all_rows(&self) -> usize {
        self.lanes * self.rows
    }
}

/// One lane's place in a pass: `start` tokens are cached, `count` rows follow. Idle lanes have count 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Span {
    pub start: usize,
    pub count: usize,
}

pub(crate) struct InputTensors {
    /// Bytes that hold, each at `STEP_ALIGN`: tokens, temperature, uniform, conditioned. What every step writes lies
    /// together, since a write to a GPU costs about ten microseconds however short it is.
    step: Handle,
    tokens: Handle,
    positions: Handle,
    slots: [Handle; 2],
    masks: [Handle; 2],
    spans: [Handle; 2],
    temperature: Handle,
    uniform: Handle,
    conditioned: Handle,
    /// What positions, slots and masks were last written for.
    written: Vec<Span>,
    buffer: Option<Buffer>,
    context: Context,
}

impl InputTensors {
    /// Lays the inputs out.
    pub fn new(key: &PassKey) -> Result<Self> {
        let context = Context::new(16, 0)?;
        let rows = key.all_rows();
        let make = |ty, shape: &[usize], name: &str| context.named(context.new_tensor(ty, shape), name).handle();
        let mask = |keys| make(GgmlType::F16, &[keys, key.rows, 1, key.lanes], "mask");
        let section = step_section(rows);
        let step = context.named(context.new_tensor(GgmlType::I8, &[4 * section]), "step");
        let part =
            |i: usize, ty, shape, name: &str| context.named(context.part(step, ty, shape, i * section), name).handle();
        Ok(Self {
            step: step.handle(),
            tokens: part(0, GgmlType::I32, [rows, 1, 1, 1], "tokens"),
            positions: make(GgmlType::I32, &[rows], "positions"),
            slots: [make(GgmlType::I64, &[rows], "slots"), make(GgmlType::I64, &[rows], "ring_slots")],
            masks: key.keys.map(mask),
            spans: [0, 1].map(|_| make(GgmlType::I64, &[4, key.lanes], "spans")),
            temperature: part(1, GgmlType::F32, [rows, 1, 1, 1], "temperature"),
            uniform: part(2, GgmlType::F32, [rows, 1, 1, 1], "uniform"),
            conditioned: part(3, GgmlType::F32, [1, rows, 1, 1], "conditioned"),
            written: Vec::new(),
            buffer: None,
            context,
        })
    }

    pub fn bytes(&self, device: Device) -> u64 {
        Buffer::size_for_context(&self.context, device)
    }

    pub fn allocate(&mut self, device: Device) -> Result<()> {
        self.buffer = Some(Buffer::for_context(&self.context, device, "a pass's inputs")?);
        Ok(())
    }

    /// For a memory measurement only.
    pub fn pretend_allocated(&self, buffer: &Buffer) {
        self.context.tensors().for_each(|t| t.pretend_allocated(buffer));
    }

    pub fn tokens(&self) -> Tensor<'_> {
        self.context.tensor(self.tokens)
    }

    pub fn positions(&self) -> Tensor<'_> {
        self.context.tensor(self.positions)
    }

    pub fn slots(&self) -> [Tensor<'_>; 2] {
        self.slots.map(|h| self.context.tensor(h))
    }

    pub fn masks(&self) -> [Tensor<'_>; 2] {
        self.masks.map(|h| self.context.tensor(h))
    }

    /// I64 [4, lanes]: the two runs of cache rows that a lane's canvas sees, as first row and count each. CUDA passes read
    /// these instead of a mask, since all rows of a canvas see the same keys.
    pub fn spans(&self) -> [Tensor<'_>; 2] {
        self.spans.map(|h| self.context.tensor(h))
    }

    /// F32 [rows].
    pub fn temperature(&self) -> Tensor<'_> {
        self.context.tensor(self.temperature)
    }

    /// F32 [rows].
    pub fn uniform(&self) -> Tensor<'_> {
        self.context.tensor(self.uniform)
    }

    /// F32 [1, rows].
    pub fn conditioned(&self) -> Tensor<'_> {
        self.context.tensor(self.conditioned)
    }

    /// Writes the rows' tokens.
    pub fn write_tokens(&self, tokens: &[i32]) {
        self.tokens().write(tokens);
    }

    /// Writes what changes with every denoising step, one number a row each, in one go.
    pub fn write_step(&self, tokens: &[i32], temperature: &[f32], uniform: &[f32], conditioned: &[f32]) {
        let section = step_section(tokens.len());
        let mut bytes = vec![0_u8; 4 * section];
        let mut put = |part: usize, words: &mut dyn Iterator<Item = [u8; 4]>| {
            bytes[part * section..].chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word));
        };
        put(0, &mut tokens.iter().map(|t| t.to_ne_bytes()));
        for (part, values) in [temperature, uniform, conditioned].into_iter().enumerate() {
            put(part + 1, &mut values.iter().map(|v| v.to_ne_bytes()));
        }
        self.context.tensor(self.step).write(&bytes);
    }

    /// Writes positions, slots and masks for the lanes' spans; nothing to do while they stay the same, as they do for all
    /// steps of a canvas.
    pub fn place(&mut self, key: &PassKey, spans: &[Span], cache: &Cache) {
        if self.written == spans {
            return;
        }
        let rows = key.all_rows();
        let mut positions = Vec::with_capacity(rows);
        let mut slots = [Vec::with_capacity(rows), Vec::with_capacity(rows)];
        for (i, span) in spans.iter().enumerate() {
            for row in 0..key.rows {
                let real = row < span.count;
                let position = span.start + row;
                positions.push(if real { position as i32 } else { 0 });
                for (ring, slots) in slots.iter_mut().enumerate() {
                    slots.push(if real { cache.slot(ring, key.lane + i, position) } else { cache.nowhere(ring) });
                }
            }
        }
        self.positions().write(&positions);
        for (ring, slots) in slots.iter().enumerate() {
            self.slots()[ring].write(slots);
            if cache.on_device() && !key.encode {
                let runs: Vec<i64> =
                    spans.iter().enumerate().flat_map(|(i, s)| runs(key.lane + i, s, cache, ring)).collect();
                self.spans()[ring].write(&runs);
            } else {
                self.masks()[ring].write(&mask(key, spans, cache, ring));
            }
        }
        self.written = spans.to_vec();
    }
}

/// Bytes between the parts of a step's numbers.
fn step_section(rows: usize) -> usize {
    (4 * rows).next_multiple_of(STEP_ALIGN)
}

/// The cache rows that a lane's canvas sees, as (first row, count) twice: a ring may wrap. An idle lane sees none.
fn runs(lane: usize, span: &Span, cache: &Cache, ring: usize) -> [i64; 4] {
    if span.count == 0 {
        return [0; 4];
    }
    let window = if ring == 1 { cache.sliding_window() } else { None };
    let first = window.map_or(0, |w| (span.start + 1).saturating_sub(w));
    let count = (span.start + span.count - first) as i64;
    let start = cache.slot(ring, lane, first);
    let end = cache.slot(ring, lane, 0) + cache.most_keys()[ring] as i64;
    let here = count.min(end - start);
    [start, here, cache.slot(ring, lane, 0), count - here]
}

/// F16 [keys, rows per lane, 1, lanes]. A canvas row sees all cached keys (sliding layers: the last window - 1) and its
/// whole canvas, the same for every row. A causal row at position p sees keys up to p (sliding layers: the last `window`
/// of them, itself included). Padding rows see key 0, since a row that sees nothing has no softmax.
fn mask(key: &PassKey, spans: &[Span], cache: &Cache, ring: usize) -> Vec<u16> {
    let keys = key.keys[ring];
    let window = if ring == 1 { cache.sliding_window() } else { None };
    let mut mask = Vec::with_capacity(keys * key.all_rows());
    for span in spans {
        let last = (span.start + span.count).saturating_sub(1);
        let held: Vec<_> = (0..keys).map(|slot| cache.position_in(ring, slot, last)).collect();
        let row_for = |visible: &dyn Fn(usize) -> bool| {
            held.iter().map(|held| if held.is_some_and(visible) { VISIBLE } else { HIDDEN }).collect::<Vec<_>>()
        };
        let oldest = |query: usize| window.map_or(0, |w| (query + 1).saturating_sub(w));
        if span.count > 0 && !key.encode {
            let row = row_for(&|p| p >= oldest(span.start)); // the window of the first canvas position, for all of them
            (0..key.rows).for_each(|_| mask.extend_from_slice(&row));
            continue;
        }
        for row in 0..key.rows {
            if row < span.count {
                let query = span.start + row;
                mask.extend(row_for(&|p| p <= query && p >= oldest(query)));
            } else {
                mask.extend((0..keys).map(|slot| if slot == 0 { VISIBLE } else { HIDDEN }));
            }
        }
    }
    mask
}
