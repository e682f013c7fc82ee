//! Families: one file and one line in `REGISTRY` each (decision D12). Nothing else in the engine names a family.

mod diffusion_gemma;

use crate::denoise::DenoiseSettings;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::{CacheLayer, Decoded, Pass, TensorSpec};
use crate::vocab::Dialect;

/// What a fresh canvas and a renoised position are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoiseKind {
    /// Tokens drawn uniformly from the vocabulary; every position may change in every step.
    Uniform,
    /// One mask token; a placed token stays.
    Mask(u32),
}

/// Sizes that every family has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dims {
    pub vocab: usize,
    pub canvas: usize,
    pub embed: usize,
    /// Longest context the file allows.
    pub max_context: usize,
    /// Final softcap of the logits, if any.
    pub softcap: Option<f32>,
}

/// A model family with the hyper-parameters of one file.
pub(crate) trait Family: Send + Sync {
    /// The architecture's name in GGUF files, and in receipts.
    fn name(&self) -> &'static str;

    fn dims(&self) -> Dims;

    fn noise(&self) -> NoiseKind;

    /// Name of the default sampler, and the loop's settings from the file or the family.
    fn sampler(&self) -> (&'static str, DenoiseSettings);

    /// What the file does not say of its vocabulary: libllama's name for it, end tokens, markers of thought text.
    fn dialect(&self) -> Dialect;

    /// The chat template where the file has none.
    fn chat_template(&self) -> &'static str;

    /// Every tensor the graph uses, with the shape the file must have.
    fn tensors(&self, file: &Gguf) -> Vec<TensorSpec>;

    /// Keys and values per layer.
    fn cache_layers(&self) -> Vec<CacheLayer>;

    /// Upper bound of graph nodes and leaves.
    fn graph_size(&self) -> usize;

    /// Causal pass over prompt tokens or a finished canvas: only writes keys and values.
    fn encode(&self, pass: &Pass<'_>) -> Result<()>;

    /// Pass over the canvases; returns the raw logits.
    fn decode<'c>(&self, pass: &Pass<'c>) -> Result<Decoded<'c>>;
}

struct Entry {
    architecture: &'static str,
    load: fn(&Gguf) -> Result<Box<dyn Family>>,
}

const REGISTRY: &[Entry] = &[Entry { architecture: "diffusion-gemma", load: diffusion_gemma::load }];

/// The family of a file, by `general.architecture`.
pub(crate) fn load(file: &Gguf) -> Result<Box<dyn Family>> {
    let architecture = file.meta().str("general.architecture")?;
    let entry = REGISTRY.iter().find(|e| e.architecture == architecture).ok_or_else(|| {
        let known: Vec<_> = REGISTRY.iter().map(|e| e.architecture).collect();
        Error::unsupported(
            file.path(),
            format!(
                "unknown architecture {:?}; this engine runs: {}. Take a file of one of these",
                architecture,
                known.join(", ")
            ),
        )
    })?;
    (entry.load)(file)
}
