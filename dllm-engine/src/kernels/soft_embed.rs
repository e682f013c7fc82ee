//! The soft embedding of a position: the sum over the vocabulary of probability * embedding, for self-conditioning.
//!
//! Contract: sources table [H, V] of any type, logits F32 [V, rows], temperature F32 [rows], stats I32 [WORDS, rows] of the
//! same logits; destination F32 [H, rows]. Products and sums are F32: in half precision a flat distribution over a large
//! vocabulary would vanish.

use llama_sys::ggml_tensor;

use crate::ggml::{GgmlType, NodeOp, dequantize, row_bytes};
use crate::kernels::stats_op::scaled;
use crate::kernels::{row, row_mut, share, source};

/// Tokens less likely than this are left out. Together they hold less than V * 1e-12 of the mass, which is below F32's
/// rounding of the sum for any vocabulary in use; it makes the cost follow the likely tokens instead of the vocabulary.
const NEGLIGIBLE: f32 = 1e-12;

pub(crate) struct SoftEmbed {
    pub softcap: Option<f32>,
}

impl NodeOp for SoftEmbed {
    unsafe fn compute(&self, dst: &ggml_tensor, ith: usize, nth: usize) {
        // SAFETY: the node was made with four sources of these types.
        let (table, logits, temperature, stats) =
            unsafe { (source(dst, 0), source(dst, 1), row::<f32>(source(dst, 2), 0, 0, 0), source(dst, 3)) };
        let Some(ty) = GgmlType::from_id(table.type_) else { return };
        let (width, vocab) = (dst.ne[0] as usize, table.ne[1] as usize);
        let rows = share(dst.ne[1] as usize, ith, nth);
        for i in rows.clone() {
            // SAFETY: i is below the row count; each row belongs to one thread.
            unsafe { row_mut::<f32>(dst, i, 0, 0) }.fill(0.0);
        }
        let mut embedding = vec![0.0_f32; width];
        // Token by token, so that an embedding is expanded once for all rows of this thread.
        let mut hits: Vec<(usize, f32)> = Vec::with_capacity(rows.len());
        for token in 0..vocab {
            hits.clear();
            for i in rows.clone() {
                // SAFETY: in range.
                let (logit, stats) = unsafe { (row::<f32>(logits, i, 0, 0)[token], row::<u32>(stats, i, 0, 0)) };
                let (max, sum) = (f32::from_bits(stats[5]), f32::from_bits(stats[6]));
                let p = (scaled(logit, self.softcap, temperature[i]) - max).exp() / sum;
                // Also leaves out NaN: rows with a logit that is no number are refused by the caller.
                if p > NEGLIGIBLE {
                    hits.push((i, p));
                }
            }
            if hits.is_empty() {
                continue;
            }
            let bytes = row_bytes(ty, width);
            // SAFETY: the table is on the host with contiguous rows; token is below the row count.
            let raw = unsafe { std::slice::from_raw_parts(table.data.cast::<u8>().add(token * table.nb[1]), bytes) };
            if dequantize(ty, raw, &mut embedding).is_err() {
                return; // ggml can expand every type that it can load; families check that at loading
            }
            for &(i, p) in &hits {
                // SAFETY: as above.
                let out = unsafe { row_mut::<f32>(dst, i, 0, 0) };
                for (out, e) in out.iter_mut().zip(&embedding) {
                    *out += p * e;
                }
            }
        }
    }
}
