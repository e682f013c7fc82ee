//! Reads a fixture folder: fixtures.json (settings) and fixtures.safetensors (arrays of the transformers reference).

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::error::{Error, Result};

/// Settings of one recorded generation.
#[derive(Debug, Clone, Deserialize)]
pub struct GenerationCase {
    pub name: String,
    pub config: GenerationConfig,
    pub canvases: Vec<CanvasRecord>,
    pub margins: Margins,
}

/// How narrowly a case's discrete choices were decided, at the narrowest.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Margins {
    /// Gap of the accumulated entropy to the bound, nats.
    pub accept_gap: f64,
    /// Gap of the router's logits between the last chosen expert and the next.
    pub router_gap: f64,
}

impl Margins {
    /// Whether no choice was narrower than `least`.
    pub fn wider_than(&self, least: Option<Margins>) -> bool {
        least.is_none_or(|m| self.accept_gap >= m.accept_gap && self.router_gap >= m.router_gap)
    }
}

#[derive(Debug, Clone, Deserialize)]
pub struct GenerationConfig {
    pub max_denoising_steps: u32,
    pub t_min: f32,
    pub t_max: f32,
    pub entropy_bound: f32,
    pub stability_threshold: u32,
    pub confidence_threshold: f32,
    pub max_new_tokens: usize,
    pub eos_token_id: Vec<u32>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct CanvasRecord {
    pub n_steps: usize,
    pub steps: Vec<StepRecord>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct StepRecord {
    pub temperature: f32,
    pub stop: bool,
    /// Smallest gap between the best and the second logit, after the temperature.
    pub argmax_gap: f32,
}

#[derive(Debug, Clone, Deserialize)]
pub struct ForwardCase {
    pub sc_temperature: f32,
}

#[derive(Debug, Clone, Deserialize)]
struct Index {
    forward_cases: BTreeMap<String, ForwardCase>,
    debug_case: Option<String>,
    generation_cases: Vec<GenerationCase>,
    preset: String,
}

/// Where an array lies in the file.
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// A fixture folder, read.
pub struct Fixtures {
    pub dir: PathBuf,
    pub forward: BTreeMap<String, ForwardCase>,
    /// The case that also records the residual after each layer.
    pub debug_case: Option<String>,
    pub generations: Vec<GenerationCase>,
    /// Size of the model: `nano`, `tiny`, `small`.
    pub preset: String,
    arrays: HashMap<String, Entry>,
    bytes: Vec<u8>,
}

/// An array: shape and values.
#[derive(Debug, Clone)]
pub struct Array<T> {
    pub shape: Vec<usize>,
    pub values: Vec<T>,
}

impl<T> Array<T> {
    /// Entry `i` of the first dimension.
    pub fn at(&self, i: usize) -> &[T] {
        let width = self.values.len() / self.shape[0].max(1);
        &self.values[i * width..(i + 1) * width]
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| Error::io("read", path, e))
}

impl Fixtures {
    /// Reads a folder.
    ///
    /// # Errors
    /// `Io` where a file is missing, `BadFile` where one is damaged.
    pub fn read(dir: &Path) -> Result<Self> {
        let json = dir.join("fixtures.json");
        let index: Index = serde_json::from_slice(&read(&json)?)
            .map_err(|e| Error::file(&json, format!("not a fixture index: {e}")))?;
        let arrays = dir.join("fixtures.safetensors");
        let bytes = read(&arrays)?;
        // The index once: it is long, and hundreds of arrays are looked up.
        let views = SafeTensors::deserialize(&bytes)
            .map_err(|e| Error::file(&arrays, format!("not a safetensors file: {e}")))?;
        let start = bytes.as_ptr().addr();
        let arrays = views
            .iter()
            .map(|(name, view)| {
                let at = view.data().as_ptr().addr() - start;
                let entry =
                    Entry { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: at..at + view.data().len() };
                (name.to_owned(), entry)
            })
            .collect();
        Ok(Self {
            preset: index.preset,
            arrays,
            dir: dir.to_owned(),
            forward: index.forward_cases,
            debug_case: index.debug_case,
            generations: index.generation_cases,
            bytes,
        })
    }

    fn bad(&self, name: &str, why: String) -> Error {
        Error::file(self.dir.join("fixtures.safetensors"), format!("array {name} {why}"))
    }

    fn raw(&self, name: &str, dtype: Dtype) -> Result<(Vec<usize>, &[u8])> {
        let again = "record the fixtures again";
        let entry = self.arrays.get(name).ok_or_else(|| self.bad(name, format!("is missing: {again}")))?;
        if entry.dtype != dtype {
            return Err(self.bad(name, format!("is {:?}, expected {dtype:?}: {again}", entry.dtype)));
        }
        Ok((entry.shape.clone(), &self.bytes[entry.bytes.clone()]))
    }

    /// Whether an array is there.
    pub fn has(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }

    pub fn f32(&self, name: &str) -> Result<Array<f32>> {
        let (shape, data) = self.raw(name, Dtype::F32)?;
        let values: Vec<f32> = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        match values.iter().position(|v| !v.is_finite()) {
            Some(at) => Err(self.bad(name, format!("has {} at place {at}: record the fixtures again", values[at]))),
            None => Ok(Array { shape, values }),
        }
    }

    /// Token ids.
    pub fn tokens(&self, name: &str) -> Result<Array<u32>> {
        let (shape, data) = self.raw(name, Dtype::I32)?;
        let values: Vec<i32> = data.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let refuse =
            |at| self.bad(name, format!("has the token {} at place {at}: record the fixtures again", values[at]));
        match values.iter().position(|id| *id < 0) {
            Some(at) => Err(refuse(at)),
            None => Ok(Array { shape, values: values.iter().map(|id| id.unsigned_abs()).collect() }),
        }
    }

    pub fn flags(&self, name: &str) -> Result<Array<bool>> {
        let (shape, data) = self.raw(name, Dtype::U8)?;
        Ok(Array { shape, values: data.iter().map(|b| *b != 0).collect() })
    }
}
