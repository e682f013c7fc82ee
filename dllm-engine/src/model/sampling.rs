//! The nodes behind the logits: statistics of every position, and the soft embedding for the next step's conditioning.

use crate::ggml::{GgmlType, Graph, Tensor};
use crate::kernels::device as op;
use crate::kernels::library::Kernels;
use crate::kernels::{PositionStats, SoftEmbed, WORDS};
use crate::model::device_pass::{GEMM_SCRATCH, Sections};
use crate::model::repack::{HEAD, SOFT_TABLE};
use crate::model::weights::Weights;
use crate::params::Level;

/// Tokens per position that level `topk` takes the soft embedding from.
pub(super) const LIKELIEST: usize = 64;

/// How the soft embedding is made.
#[derive(Clone, Copy)]
pub(super) struct Sampling<'w> {
    pub weights: &'w Weights,
    pub softcap: Option<f32>,
    pub kernels: Option<&'static Kernels>,
    pub level: Level,
}

/// Statistics, I32 [`WORDS`, rows] (or more bytes behind them), and the soft embedding, F32 [H, rows], of logits F32 [V, rows]
/// over temperatures F32 [rows], with draws by uniform numbers F32 [rows].
pub(super) fn sample<'c>(
    s: &Sampling<'c>,
    graph: &'c Graph,
    logits: Tensor<'c>,
    temperature: Tensor<'c>,
    uniform: Tensor<'c>,
    table: Tensor<'c>,
) -> (Tensor<'c>, Tensor<'c>) {
    let cx = graph.context();
    let [vocab, rows, ..] = logits.shape();
    let hidden = table.shape()[0];
    let Some(kernels) = s.kernels else {
        let stats = graph.own(PositionStats { softcap: s.softcap });
        let stats = stats.node(cx, GgmlType::I32, [WORDS, rows, 1, 1], &[logits, temperature, uniform]);
        let soft = graph.own(SoftEmbed { softcap: s.softcap });
        let soft = soft.node(cx, GgmlType::F32, [hidden, rows, 1, 1], &[table, logits, temperature, stats]);
        return (stats, soft);
    };
    // A composed pass has the table in the host's memory and a copy here.
    let table = [SOFT_TABLE, HEAD].into_iter().find_map(|name| s.weights.get(name)).unwrap_or(table);
    let (r, v, h) = (rows as i32, vocab as i32, hidden as i32);
    let cap = s.softcap.unwrap_or(0.0);
    let mut sections = Sections::default();
    sections.add(4 * WORDS * rows);
    let stats_scratch = sections.add(kernels.stats_scratch(rows, vocab));
    let stats = graph.own(op::DeviceStats { kernels, rows: r, vocab: v, cap, scratch: stats_scratch });
    let stats = stats.node(cx, GgmlType::I8, [sections.bytes(), 1, 1, 1], &[logits, temperature, uniform]);
    let soft = if s.level == Level::TopK {
        let count = LIKELIEST.min(vocab);
        let mut sections = Sections::default();
        sections.add(4 * count * rows);
        let (weights, dropped) = (sections.add(4 * count * rows), sections.add(4 * rows));
        let likeliest = graph.own(op::Likeliest {
            kernels,
            rows: r,
            vocab: v,
            cap,
            stats_scratch,
            count: count as i32,
            weights,
            dropped,
        });
        let block = likeliest.node(cx, GgmlType::I8, [sections.bytes(), 1, 1, 1], &[logits, temperature, stats]);
        let ids = cx.part(block, GgmlType::I32, [count, rows, 1, 1], 0);
        let weights = cx.part(block, GgmlType::F32, [count, rows, 1, 1], weights);
        let soft =
            op::SoftEmbedLikeliest { kernels, table: table.ty(), vocab: v, hidden: h, rows: r, count: count as i32 };
        graph.own(soft).node(cx, GgmlType::F32, [hidden, rows, 1, 1], &[table, ids, weights])
    } else {
        let halves = |name| s.weights.repacked(name).and_then(|r| r.parts.first()).filter(|part| part.ty.is_none());
        let table = halves(SOFT_TABLE).or_else(|| halves(HEAD)).map_or(table, |part| s.weights.part(part));
        let mut sections = Sections::default();
        sections.add(4 * hidden * rows);
        let probs = sections.add(2 * vocab * rows);
        let piece = sections.add(kernels.soft_piece_bytes(table.ty().id() as i32, hidden));
        let scratch = sections.add(GEMM_SCRATCH);
        let ty = table.ty();
        let soft = op::SoftEmbedDense { kernels, table: ty, rows: r, vocab: v, hidden: h, cap, probs, piece, scratch };
        let block =
            graph.own(soft).node(cx, GgmlType::I8, [sections.bytes(), 1, 1, 1], &[table, logits, temperature, stats]);
        cx.part(block, GgmlType::F32, [hidden, rows, 1, 1], 0)
    };
    (stats, soft)
}
