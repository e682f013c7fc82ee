//! What parity checks need to see and to inject.

use crate::error::{Error, Result};
use crate::ggml::{Buffer, Context, GgmlType, Graph};
use crate::model::Network;
use crate::model::sampling::{Sampling, sample};
use crate::model::workspace::Workspace;

impl Network {
    /// Keeps intermediate results of the passes built from now on.
    pub(crate) fn tap(&mut self) {
        self.tapping = true;
        self.decode.kept.clear();
        self.encode.kept.clear();
    }

    /// An intermediate result of the last decoder (`encode` false) or encoder pass, as 32-bit words, row by row.
    pub(crate) fn tapped(&self, encode: bool, name: &str) -> Option<(usize, Vec<u32>)> {
        let compiled = if encode { self.encode.kept.last()? } else { self.decode.kept.last()? };
        let (_, handle) = compiled.taps.iter().find(|(n, _)| n == name)?;
        let tensor = compiled.graph.context().tensor(*handle);
        let [row, ..] = tensor.shape();
        let strides = tensor.strides();
        let rows = tensor.elements() / row;
        // Top-k results are views of a wider sort: read row by row.
        let words = (0..rows).flat_map(|i| tensor.read_at::<u32>(i * strides[1], row)).collect();
        Some((row, words))
    }

    /// Keys (`which` 0) or values (1) of a layer and lane at a position, F32 [kv heads * head].
    pub(crate) fn cached(&self, layer: usize, which: usize, lane: usize, position: usize) -> Result<Vec<f32>> {
        self.cache.read(layer, which, lane, position)
    }

    /// Positions of a lane that the cache of a layer still holds: all, or those that a ring has not overwritten.
    pub(crate) fn held(&self, layer: usize, lane: usize, len: usize) -> std::ops::Range<usize> {
        self.cache.held(layer, lane, len)
    }

    /// Makes a lane's next step be conditioned by given logits (softcapped already), [canvas, V], over `temperature`.
    pub(crate) fn condition_on(&mut self, lane: usize, logits: &[f32], temperature: f32) -> Result<()> {
        let (device, shape) = (self.config.device, self.config.shape);
        let holder = Context::new(4, 0)?;
        let given = holder.new_tensor(GgmlType::F32, &[shape.vocab, shape.canvas]);
        let temperatures = holder.new_tensor(GgmlType::F32, &[shape.canvas]);
        let uniform = holder.new_tensor(GgmlType::F32, &[shape.canvas]);
        let _buffer = Buffer::for_context(&holder, device, "given logits")?;
        given.write(logits);
        temperatures.write(&vec![temperature; shape.canvas]);
        let mut graph = Graph::new(16)?;
        let table = self.weights.get("token_embd.weight").ok_or_else(|| Error::Backend("no embedding table".into()))?;
        {
            let cx = graph.context();
            let sampling = Sampling {
                weights: &self.weights,
                softcap: None,
                kernels: self.config.sampling,
                level: self.config.level,
            };
            let (_, soft) = sample(&sampling, &graph, given, temperatures, uniform, table);
            let state = self.state.context.tensor(self.state.soft);
            let row = state.strides()[1];
            let into = cx.view(
                state,
                [self.config.embed, shape.canvas, 1, 1],
                [row, row * shape.canvas, row * shape.canvas],
                lane * shape.canvas * row,
            );
            graph.expand(cx.copy(soft, into));
        }
        let mut workspace = Workspace::new(&self.config, &self.backends, 64)?;
        workspace.allocate(&mut graph)?;
        workspace.compute(&self.backends, &mut graph)
    }
}
