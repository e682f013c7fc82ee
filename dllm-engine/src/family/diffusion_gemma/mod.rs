//! DiffusionGemma: a mixture of experts that denoises a canvas of uniformly random tokens.
//!
//! One stack of layers in two modes: the encoder is causal over prompt and finished canvases and only fills the cache; the
//! decoder sees the whole canvas and the cached prompt. Maths: the transformers reference, as written down in
//! docs/model-diffusion-gemma.md; section numbers below are that page's.

mod device;

use crate::denoise::DenoiseSettings;
use crate::error::{Error, Result};
use crate::family::{Dims, Family, NoiseKind};
use crate::ggml::{Rope, Tensor};
use crate::gguf::Gguf;
use crate::model::{Attention, CacheLayer, Decoded, Experts, HEAD, Pass, Role, TensorSpec};
use crate::vocab::{Dialect, ThoughtMarkers};

const ARCH: &str = "diffusion-gemma";

/// Used where a file brings no template: the turn format the model was trained on.
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n\
    {{ m['content'] }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}";

struct Layer {
    sliding: bool,
    head: usize,
    kv_heads: usize,
    /// Full layers have no value projection: the value is the raw key projection.
    has_value: bool,
    /// Gate and up projections of the experts in one matrix, or in two.
    fused_experts: bool,
}

struct DiffusionGemma {
    dims: Dims,
    layers: Vec<Layer>,
    heads: usize,
    ff: usize,
    window: usize,
    eps: f32,
    rope_full: Rope,
    rope_sliding: Rope,
    experts: usize,
    experts_used: usize,
    expert_ff: usize,
    has_output: bool,
    settings: DenoiseSettings,
}

pub(super) fn load(file: &Gguf) -> Result<Box<dyn Family>> {
    let meta = file.meta();
    let key = |name: &str| format!("{ARCH}.{name}");
    let size = |name: &str| meta.u32(&key(name)).map(|n| n as usize);
    let size_or =
        |name: &str, default: usize| Ok::<_, Error>(meta.u32_opt(&key(name))?.map_or(default, |n| n as usize));
    let refuse = |why: String| Error::unsupported(file.path(), format!("{why}; get an intact file or another model"));

    let count = size("block_count")?;
    let embed = size("embedding_length")?;
    for (name, value) in [("block_count", count), ("embedding_length", embed)] {
        if value == 0 || value > 1 << 20 {
            return Err(refuse(format!("{} is {value}, not in 1..={}", key(name), 1 << 20)));
        }
    }
    for absent in ["attention.shared_kv_layers", "embedding_length_per_layer_input"] {
        if size_or(absent, 0)? != 0 {
            return Err(refuse(format!("{} is not 0: such layers are not supported", key(absent))));
        }
    }
    let (head_full, head_sliding) = (size("attention.key_length")?, size("attention.key_length_swa")?);
    for (k, v) in
        [("attention.key_length", "attention.value_length"), ("attention.key_length_swa", "attention.value_length_swa")]
    {
        let (k_size, v_size) = (size(k)?, size(v)?);
        if k_size != v_size || k_size == 0 || k_size % 2 != 0 || k_size > 4096 {
            return Err(refuse(format!(
                "{} is {k_size} and {} is {v_size}: they must be equal, even and at most 4096",
                key(k),
                key(v)
            )));
        }
    }
    let per_layer = |name: &str| meta.per_layer_u32(&key(name), count as u32);
    let kv_heads = per_layer("attention.head_count_kv")?;
    let sliding = meta.array_bool(&key("attention.sliding_window_pattern"))?;
    if sliding.len() != count {
        return Err(refuse(format!(
            "{count} layers, but {} entries in {}",
            sliding.len(),
            key("attention.sliding_window_pattern")
        )));
    }
    let heads = size("attention.head_count")?;
    if let Some(bad) = kv_heads.iter().find(|&&n| n == 0 || !heads.is_multiple_of(n as usize)) {
        let (q, kv) = (key("attention.head_count"), key("attention.head_count_kv"));
        return Err(refuse(format!("{heads} heads cannot share {bad} key heads ({q}, {kv})")));
    }
    let layers = (0..count)
        .map(|i| Layer {
            sliding: sliding[i],
            head: if sliding[i] { head_sliding } else { head_full },
            kv_heads: kv_heads[i] as usize,
            has_value: file.tensor(&format!("blk.{i}.attn_v.weight")).is_some(),
            fused_experts: file.tensor(&format!("blk.{i}.ffn_gate_up_exps.weight")).is_some(),
        })
        .collect::<Vec<_>>();
    if let Some(i) = layers.iter().position(|l| l.sliding && !l.has_value) {
        return Err(Error::file(
            file.path(),
            format!("tensor blk.{i}.attn_v.weight is missing, which a sliding layer needs: get an intact file"),
        ));
    }

    let rope = |name: &str, head: usize, base: &str, default: f32| {
        let dims = size_or(name, head)?;
        if dims == 0 || dims % 2 != 0 || dims > head {
            return Err(refuse(format!("{} is {dims}: it must be even and at most the head size {head}", key(name))));
        }
        let base_value = meta.f32_opt(&key(base))?.unwrap_or(default);
        if base_value <= 0.0 {
            return Err(refuse(format!("{} is {base_value}: it must be above 0", key(base))));
        }
        Ok(Rope { dims, base: base_value })
    };
    let (experts, experts_used) = (size("expert_count")?, size("expert_used_count")?);
    if experts_used == 0 || experts_used > experts {
        return Err(refuse(format!("{experts_used} of {experts} experts cannot be used per token")));
    }
    let eps = meta.f32(&key("attention.layer_norm_rms_epsilon"))?;
    if !(eps > 0.0 && eps < 1.0) {
        return Err(refuse(format!("{} is {eps}, not between 0 and 1", key("attention.layer_norm_rms_epsilon"))));
    }
    let vocab = file
        .tensor("token_embd.weight")
        .map(|t| t.shape[1] as usize)
        .ok_or_else(|| Error::file(file.path(), "tensor token_embd.weight is missing: get an intact file"))?;
    let canvas = meta.u32("diffusion.canvas_length")? as usize;
    if canvas == 0 || canvas > 1 << 16 {
        return Err(refuse(format!("diffusion.canvas_length is {canvas}, not in 1..=65536")));
    }
    let ff = per_layer("feed_forward_length")?;
    let window = size("attention.sliding_window")?;
    if window == 0 {
        return Err(refuse(format!("{} is 0", key("attention.sliding_window"))));
    }
    let Some(&width) = ff.first().filter(|first| ff.iter().all(|n| n == *first)) else {
        return Err(refuse(format!("{} has entries that differ: {ff:?}", key("feed_forward_length"))));
    };
    let max_context = size("context_length")?;
    if max_context <= canvas {
        return Err(refuse(format!(
            "{} is {max_context}, which holds no prompt and a canvas of {canvas}",
            key("context_length")
        )));
    }
    // Some files write 0 for none.
    let softcap = meta.f32_opt(&key("final_logit_softcapping"))?.filter(|cap| *cap != 0.0);
    if let Some(cap) = softcap.filter(|cap| *cap < 0.0) {
        return Err(refuse(format!("{} is {cap}: it must be above 0, or 0 for none", key("final_logit_softcapping"))));
    }
    let number =
        |name: &str, default: f32| Ok::<_, Error>(meta.f32_opt(&format!("diffusion.{name}"))?.unwrap_or(default));
    let count_or =
        |name: &str, default: u32| Ok::<_, Error>(meta.u32_opt(&format!("diffusion.{name}"))?.unwrap_or(default));
    let settings = DenoiseSettings {
        max_steps: count_or("eb_max_steps", 48)?,
        t_min: number("eb_t_min", 0.4)?,
        t_max: number("eb_t_max", 0.8)?,
        entropy_bound: number("eb_entropy_bound", 0.1)?,
        stability_threshold: Some(count_or("eb_stability_threshold", 1)?),
        confidence_threshold: Some(number("eb_confidence_threshold", 0.005)?),
    };
    settings.check().map_err(|error| match error {
        Error::BadArgument { name, why } => refuse(format!("diffusion.eb_{name}: {why}")),
        other => other,
    })?;
    Ok(Box::new(DiffusionGemma {
        dims: Dims { vocab, canvas, embed, max_context, softcap },
        layers,
        heads,
        ff: width as usize,
        window,
        eps,
        rope_full: rope("rope.dimension_count", head_full, "rope.freq_base", 1e6)?,
        rope_sliding: rope("rope.dimension_count_swa", head_sliding, "rope.freq_base_swa", 1e4)?,
        experts,
        experts_used,
        expert_ff: size("expert_feed_forward_length")?,
        has_output: file.tensor("output.weight").is_some(),
        settings,
    }))
}

impl Family for DiffusionGemma {
    fn name(&self) -> &'static str {
        ARCH
    }

    fn dims(&self) -> Dims {
        self.dims
    }

    fn noise(&self) -> NoiseKind {
        NoiseKind::Uniform
    }

    fn sampler(&self) -> (&'static str, DenoiseSettings) {
        ("entropy-bound", self.settings.clone())
    }

    fn dialect(&self) -> Dialect {
        Dialect {
            architecture: "gemma4",
            end_texts: &["<eos>", "<turn|>", "<|tool_response>"],
            thought: Some(ThoughtMarkers { open: "<|channel>", close: "<channel|>", name: "thought" }),
        }
    }

    fn chat_template(&self) -> &'static str {
        TEMPLATE
    }

    fn tensors(&self, _: &Gguf) -> Vec<TensorSpec> {
        let (h, ff, xff, nx) = (self.dims.embed, self.ff, self.expert_ff, self.experts);
        let mut list = vec![
            TensorSpec::new("token_embd.weight", [h, self.dims.vocab, 1], Role::Table { head: !self.has_output }),
            TensorSpec::vector("output_norm.weight", h),
            TensorSpec::vector("self_cond_pre_norm.weight", h),
            TensorSpec::dense("self_cond_gate.weight", h, ff, "self_cond_gate_up"),
            TensorSpec::dense("self_cond_up.weight", h, ff, "self_cond_gate_up"),
            TensorSpec::dense("self_cond_down.weight", ff, h, "self_cond_down"),
        ];
        if let Some(full) = self.layers.iter().find(|l| !l.sliding) {
            list.push(TensorSpec::vector("rope_freqs.weight", full.head / 2));
        }
        if self.has_output {
            list.push(TensorSpec::dense("output.weight", h, self.dims.vocab, HEAD));
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let name = |part: &str| format!("blk.{i}.{part}");
            let vector = |part: &str, n| TensorSpec::vector(name(part), n);
            let dense = |part: &str, k, n, stack: &str| TensorSpec::dense(&name(part), k, n, &name(stack));
            let experts = |part: &str, shape, role| TensorSpec::new(name(part), shape, role);
            let (q, kv) = (self.heads * layer.head, layer.kv_heads * layer.head);
            for part in [
                "attn_norm",
                "post_attention_norm",
                "ffn_norm",
                "post_ffw_norm",
                "post_ffw_norm_1",
                "pre_ffw_norm_2",
                "post_ffw_norm_2",
            ] {
                list.push(vector(&format!("{part}.weight"), h));
            }
            // Stacks in the order that the passes read their products.
            list.push(dense("attn_q.weight", h, q, "attn_qkv"));
            list.push(dense("attn_k.weight", h, kv, "attn_qkv"));
            if layer.has_value {
                list.push(dense("attn_v.weight", h, kv, "attn_qkv"));
            }
            list.extend([
                dense("attn_output.weight", q, h, "attn_output"),
                dense("ffn_gate.weight", h, ff, "ffn_gate_up"),
                dense("ffn_up.weight", h, ff, "ffn_gate_up"),
                dense("ffn_down.weight", ff, h, "ffn_down"),
                vector("attn_q_norm.weight", layer.head),
                vector("attn_k_norm.weight", layer.head),
                vector("layer_output_scale.weight", 1),
                vector("enc_layer_output_scale.weight", 1),
                experts("ffn_gate_inp.weight", [h, nx, 1], Role::Router),
                vector("ffn_gate_inp.scale", h),
                vector("ffn_down_exps.scale", nx).optional(),
            ]);
            if layer.fused_experts {
                list.push(experts("ffn_gate_up_exps.weight", [h, 2 * xff, nx], Role::GateUp));
            } else {
                list.push(experts("ffn_gate_exps.weight", [h, xff, nx], Role::Gate));
                list.push(experts("ffn_up_exps.weight", [h, xff, nx], Role::Up));
            }
            list.push(experts("ffn_down_exps.weight", [xff, h, nx], Role::Down));
        }
        list
    }

    fn cache_layers(&self) -> Vec<CacheLayer> {
        self.layers
            .iter()
            .map(|l| CacheLayer { head: l.head, kv_heads: l.kv_heads, window: l.sliding.then_some(self.window) })
            .collect()
    }

    fn graph_size(&self) -> usize {
        // About 80 nodes and 25 weights a layer with 8 experts per token; each extra choice adds two.
        self.layers.len() * (128 + 4 * self.experts_used) + 128
    }

    fn encode(&self, pass: &Pass<'_>) -> Result<()> {
        if pass.kernels.is_some() {
            return self.encode_on_device(pass);
        }
        let mut h = self.embed(pass); // [H, rows]
        for i in 0..self.layers.len() {
            // Only keys and values of the last layer are used: its attention and feed-forward would be thrown away.
            if i + 1 == self.layers.len() {
                self.write_keys(pass, i, h);
                break;
            }
            h = self.layer(pass, i, h, "enc_layer_output_scale.weight");
        }
        Ok(())
    }

    fn decode<'c>(&self, pass: &Pass<'c>) -> Result<Decoded<'c>> {
        if pass.kernels.is_some() {
            return self.decode_on_device(pass);
        }
        let cx = pass.cx;
        let conditioned = cx.add(self.embed(pass), self.self_conditioning(pass)); // [H, rows]
        // Always normed, also at the first step, where the signal is zero (section 6).
        let mut h = cx.rms_norm(conditioned, self.eps);
        pass.tap("decoder_input", h);
        for i in 0..self.layers.len() {
            h = self.layer(pass, i, h, "layer_output_scale.weight");
        }
        let head = ["output.weight", HEAD].into_iter().find(|name| pass.weights.get(name).is_some());
        let head = head.unwrap_or("token_embd.weight");
        let logits = pass.linear(head, pass.norm("output_norm.weight", h, self.eps)); // [V, rows]
        Ok(Decoded { logits, table: pass.weight("token_embd.weight") })
    }
}

impl DiffusionGemma {
    /// Embeddings are multiplied by sqrt(H) (section 3).
    fn embed_scale(&self) -> f32 {
        (self.dims.embed as f32).sqrt()
    }

    fn experts(&self, i: usize) -> Experts {
        Experts {
            layer: i,
            count: self.experts,
            used: self.experts_used,
            width: self.expert_ff,
            fused: self.layers[i].fused_experts,
        }
    }

    /// E[token] * sqrt(H), [H, rows] (section 3).
    fn embed<'c>(&self, pass: &Pass<'c>) -> Tensor<'c> {
        let rows = pass.cx.get_rows(pass.weight("token_embd.weight"), pass.inputs.tokens);
        pass.cx.scale(rows, self.embed_scale())
    }

    /// What the previous step's distribution adds to the embeddings, [H, rows]; zero where a lane has no previous step
    /// (section 6). The soft embedding itself was made at the end of that step.
    fn self_conditioning<'c>(&self, pass: &Pass<'c>) -> Tensor<'c> {
        let cx = pass.cx;
        let soft = cx.scale(pass.inputs.soft, self.embed_scale());
        let n = pass.norm("self_cond_pre_norm.weight", soft, self.eps);
        let signal = pass.gated("self_cond_gate.weight", "self_cond_up.weight", "self_cond_down.weight", n);
        cx.mul(signal, pass.inputs.conditioned)
    }

    fn attention(&self, i: usize) -> Attention {
        let layer = &self.layers[i];
        Attention {
            layer: i,
            heads: self.heads,
            head: layer.head,
            kv_heads: layer.kv_heads,
            rope: if layer.sliding { self.rope_sliding } else { self.rope_full },
            rope_factors: (!layer.sliding).then_some("rope_freqs.weight"),
            value: layer.has_value,
            eps: self.eps,
            scale: 1.0, // no 1/sqrt(d): the key norm carries it (section 4)
        }
    }

    fn write_keys(&self, pass: &Pass<'_>, i: usize, h: Tensor<'_>) {
        let x = pass.norm_in(i, "attn_norm.weight", h, self.eps);
        pass.write_keys(&self.attention(i), x);
    }

    /// One layer (section 5); `scalar` names the mode's own factor of the whole residual.
    fn layer<'c>(&self, pass: &Pass<'c>, i: usize, h: Tensor<'c>, scalar: &str) -> Tensor<'c> {
        let cx = pass.cx;
        let norm = |name: &str, x| pass.norm_in(i, name, x, self.eps);
        let name = |part: &str| format!("blk.{i}.{part}");

        let attended = pass.attention(&self.attention(i), norm("attn_norm.weight", h));
        let r = cx.add(h, norm("post_attention_norm.weight", attended)); // [H, rows]

        let dense = pass.gated(
            &name("ffn_gate.weight"),
            &name("ffn_up.weight"),
            &name("ffn_down.weight"),
            norm("ffn_norm.weight", r),
        );
        let dense = norm("post_ffw_norm_1.weight", dense);

        // The router reads the raw residual, not a branch's normed input.
        let routed = cx.mul(cx.rms_norm(r, self.eps), pass.weight(&name("ffn_gate_inp.scale")));
        let routed = cx.scale(routed, 1.0 / (self.dims.embed as f32).sqrt());
        let mixed = pass.experts(&self.experts(i), routed, norm("pre_ffw_norm_2.weight", r));
        let mixed = norm("post_ffw_norm_2.weight", mixed);

        let f = norm("post_ffw_norm.weight", cx.add(dense, mixed));
        let out = cx.mul(cx.add(r, f), pass.weight(&name(scalar)));
        pass.tap(&format!("residual.{i}"), out);
        out
    }
}
