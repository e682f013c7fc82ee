//! The graph op around `position_stats`: from raw logits to the numbers of a position, without the logits leaving the device.
//!
//! Contract: sources logits F32 [V, rows], temperature F32 [rows], uniform F32 [rows]; destination I32 [WORDS, rows], words
//! being argmax, drawn, entropy, probability of argmax, probability of drawn, and three that only the device reads: the
//! argmax's capped logit over the temperature, the sum of exp(z - that), 0. Floats are stored by their bits. A row with a
//! logit that is no number has argmax u32::MAX.

use llama_sys::ggml_tensor;

use crate::ggml::NodeOp;
use crate::kernels::position_stats::{NOT_FINITE, position_stats};
use crate::kernels::{row, row_mut, share, source};
use crate::model::Position;

/// 32-bit words per row.
pub(crate) const WORDS: usize = 8;

pub(crate) struct PositionStats {
    pub softcap: Option<f32>,
}

impl PositionStats {
    /// Unpacks a row of `WORDS`; `NOT_FINITE` if a logit is no number.
    pub fn unpack(words: &[u32]) -> Position {
        match *words {
            [argmax, drawn, entropy, argmax_prob, drawn_prob, ..] if argmax != u32::MAX => {
                let [entropy, argmax_prob, drawn_prob] = [entropy, argmax_prob, drawn_prob].map(f32::from_bits);
                Position { argmax, drawn, entropy, argmax_prob, drawn_prob }
            }
            _ => NOT_FINITE,
        }
    }
}

/// cap * tanh(logit / cap) / temperature.
pub(super) fn scaled(logit: f32, softcap: Option<f32>, temperature: f32) -> f32 {
    softcap.map_or(logit, |cap| cap * (logit / cap).tanh()) / temperature
}

impl NodeOp for PositionStats {
    unsafe fn compute(&self, dst: &ggml_tensor, ith: usize, nth: usize) {
        // SAFETY: the node was made with three sources of these types.
        let (logits, temperature, uniform) =
            unsafe { (source(dst, 0), row::<f32>(source(dst, 1), 0, 0, 0), row::<f32>(source(dst, 2), 0, 0, 0)) };
        for i in share(dst.ne[1] as usize, ith, nth) {
            // SAFETY: i is below the row count; each row belongs to one thread.
            let (out, logits) = unsafe { (row_mut::<u32>(dst, i, 0, 0), row::<f32>(logits, i, 0, 0)) };
            let p = position_stats(logits, self.softcap, temperature[i], uniform[i]);
            let top = logits.get(p.argmax as usize).map_or(0.0, |&x| scaled(x, self.softcap, temperature[i]));
            let floats = [p.entropy, p.argmax_prob, p.drawn_prob, top, 1.0 / p.argmax_prob, 0.0];
            out[..2].copy_from_slice(&[p.argmax, p.drawn]);
            for (out, value) in out[2..].iter_mut().zip(floats) {
                *out = value.to_bits();
            }
        }
    }
}
