//! Reads a fixture folder: fixtures.json (settings) and fixtures.safetensors (arrays of the transformers reference).

use std::collections::BTreeMap;
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
}

/// A fixture folder, read.
pub struct Fixtures {
    pub dir: PathBuf,
    pub forward: BTreeMap<String, ForwardCase>,
    /// The case that also records the residual after each layer.
    pub debug_case: Option<String>,
    pub generations: Vec<GenerationCase>,
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
        SafeTensors::deserialize(&bytes).map_err(|e| Error::file(&arrays, format!("not a safetensors file: {e}")))?;
        Ok(Self {
            dir: dir.to_owned(),
            forward: index.forward_cases,
            debug_case: index.debug_case,
            generations: index.generation_cases,
            bytes,
        })
    }

    fn raw(&self, name: &str, dtypes: &[Dtype]) -> Result<(Vec<usize>, Vec<u8>)> {
        let path = self.dir.join("fixtures.safetensors");
        let all = SafeTensors::deserialize(&self.bytes).map_err(|e| Error::file(&path, e.to_string()))?;
        let view = all.tensor(name).map_err(|e| Error::file(&path, format!("array {name}: {e}")))?;
        if !dtypes.contains(&view.dtype()) {
            return Err(Error::file(&path, format!("array {name} is {:?}, expected {dtypes:?}", view.dtype())));
        }
        Ok((view.shape().to_vec(), view.data().to_vec()))
    }

    /// Whether an array is there.
    pub fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.bytes).is_ok_and(|all| all.tensor(name).is_ok())
    }

    pub fn f32(&self, name: &str) -> Result<Array<f32>> {
        let (shape, data) = self.raw(name, &[Dtype::F32])?;
        let values = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Array { shape, values })
    }

    /// Token ids.
    pub fn tokens(&self, name: &str) -> Result<Array<u32>> {
        let (shape, data) = self.raw(name, &[Dtype::I32])?;
        let values = data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Array { shape, values })
    }

    pub fn flags(&self, name: &str) -> Result<Array<bool>> {
        let (shape, data) = self.raw(name, &[Dtype::U8])?;
        Ok(Array { shape, values: data.into_iter().map(|b| b != 0).collect() })
    }
}
