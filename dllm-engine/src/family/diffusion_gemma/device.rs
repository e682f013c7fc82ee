//! The same passes on a CUDA device. Norms stand at the end of the chain that makes their input, so every step takes the
//! residual and its normed copy together. Section numbers are those of docs/model-diffusion-gemma.md.

use super::DiffusionGemma;
use crate::error::Result;
use crate::ggml::Tensor;
use crate::model::{Decoded, DevicePass, HEAD, Pass};

impl DiffusionGemma {
    fn device_pass<'p, 'c>(&self, pass: &'p Pass<'c>) -> Result<DevicePass<'p, 'c>> {
        let of = |sliding: bool| self.layers.iter().find(|l| l.sliding == sliding).map_or(2, |l| l.head);
        let full = self.layers.iter().any(|l| !l.sliding).then_some("rope_freqs.weight");
        let ropes = [(self.rope_full, of(false), full), (self.rope_sliding, of(true), None)];
        DevicePass::new(pass, (self.eps, self.dims.embed), ropes)
    }

    pub(super) fn encode_on_device(&self, pass: &Pass<'_>) -> Result<()> {
        let d = self.device_pass(pass)?;
        let mut h = d.embed("token_embd.weight", self.embed_scale()); // [H, rows]
        let mut x = d.norm(pass.weight("blk.0.attn_norm.weight"), h, 1.0);
        for i in 0..self.layers.len() {
            // Only keys and values of the last layer are used.
            if i + 1 == self.layers.len() {
                d.write_keys(&self.attention(i), x);
                break;
            }
            (h, x) = self.layer_on_device(&d, i, h, x, "enc_layer_output_scale.weight");
        }
        Ok(())
    }

    pub(super) fn decode_on_device<'c>(&self, pass: &Pass<'c>) -> Result<Decoded<'c>> {
        let d = self.device_pass(pass)?;
        let e = d.embed("token_embd.weight", self.embed_scale());
        // Self-conditioning (section 6); the flag of a row without a previous step is 0.
        let n = d.norm(pass.weight("self_cond_pre_norm.weight"), pass.inputs.soft, self.embed_scale());
        let signal = d.gated("self_cond_gate_up", "self_cond_down", n);
        let (mut h, mut x) = d.input(e, signal, pass.weight("blk.0.attn_norm.weight"));
        pass.tap("decoder_input", h);
        for i in 0..self.layers.len() {
            (h, x) = self.layer_on_device(&d, i, h, x, "layer_output_scale.weight");
        }
        let logits = d.dense(HEAD, x); // [V, rows]
        Ok(Decoded { logits, table: pass.weight("token_embd.weight") })
    }

    /// One layer (section 5): residual and its normed copy in and out.
    fn layer_on_device<'c>(
        &self,
        d: &DevicePass<'_, 'c>,
        i: usize,
        h: Tensor<'c>,
        x: Tensor<'c>,
        scalar: &str,
    ) -> (Tensor<'c>, Tensor<'c>) {
        let branches = d.branches(i, h, d.attention(&self.attention(i), x));
        let (dense, mixed) = d.feed_forward(&self.experts(i), &branches);
        let next = match i + 1 < self.layers.len() {
            true => d.pass.weight(&format!("blk.{}.attn_norm.weight", i + 1)),
            false => d.pass.weight("output_norm.weight"),
        };
        let (h, x) = d.join(i, branches.residual, dense, mixed, scalar, next);
        d.pass.tap(&format!("residual.{i}"), h);
        (h, x)
    }
}
