//! Damaged and foreign model files, and parameters that cannot be had: each is refused with an error that names what is
//! wrong. The files are copies of a small fixture with one thing changed.

use std::path::{Path, PathBuf};

use dllm_engine::gguf::Gguf;
use dllm_engine::{Engine, EngineParams, Error, ModelSource};
use tempfile::TempDir;

fn fixture() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracle/nano/model.gguf")).unwrap()
}

fn params(path: PathBuf) -> EngineParams {
    let mut params = EngineParams::default();
    (params.model, params.context, params.threads) = (ModelSource::Path(path), 128, 1);
    params
}

/// The error of loading the fixture after `change`.
fn refusal(change: impl FnOnce(&mut Vec<u8>)) -> Error {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("modell mit Umlaut ä.gguf");
    let mut bytes = fixture();
    change(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    match Engine::load(params(path)) {
        Ok(_) => panic!("the file was accepted"),
        Err(error) => error,
    }
}

fn assert_says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

fn find(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).position(|w| w == text.as_bytes()).unwrap_or_else(|| panic!("no {text}"))
}

fn replace(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let at = find(bytes, from);
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
}

/// Where a tensor's number of dimensions stands: behind its name.
fn dims_at(bytes: &[u8], name: &str) -> usize {
    find(bytes, name) + name.len()
}

#[test]
fn unknown_architecture_lists_the_known_ones() {
    let error = refusal(|b| {
        let at = find(b, "general.architecture") + "general.architecture".len() + 4 + 8;
        b[at..at + 15].copy_from_slice(b"perfusion-gemma");
    });
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert_says(&error, &["perfusion-gemma", "diffusion-gemma"]);
}

#[test]
fn missing_key_is_named() {
    let error = refusal(|b| replace(b, "diffusion.canvas_length", "diffusion.canvas_lengtx"));
    assert_says(&error, &["diffusion.canvas_length", "missing"]);
}

#[test]
fn missing_tensor_is_named() {
    assert_says(
        &refusal(|b| replace(b, "blk.1.attn_q.weight", "blk.1.attn_z.weight")),
        &["blk.1.attn_q.weight", "missing"],
    );
}

#[test]
fn missing_self_conditioning_is_named() {
    assert_says(&refusal(|b| replace(b, "self_cond_gate.weight", "self_cond_gaze.weight")), &["self_cond_gate.weight"]);
}

#[test]
fn wrong_shape_names_tensor_and_both_shapes() {
    let error = refusal(|b| {
        let at = dims_at(b, "blk.0.ffn_gate_inp.weight") + 4;
        let (first, second): (Vec<u8>, Vec<u8>) = (b[at..at + 8].to_vec(), b[at + 8..at + 16].to_vec());
        b[at..at + 8].copy_from_slice(&second);
        b[at + 8..at + 16].copy_from_slice(&first);
    });
    assert_says(&error, &["blk.0.ffn_gate_inp.weight", "[4, 64, 1, 1]", "[64, 4, 1, 1]"]);
}

#[test]
fn wrong_type_is_named() {
    let error = refusal(|b| {
        let at = dims_at(b, "output_norm.weight") + 4 + 8; // one dimension, then the type
        b[at..at + 4].copy_from_slice(&26_u32.to_le_bytes()); // I32, as many bytes
    });
    assert_says(&error, &["output_norm.weight", "I32", "F32"]);
}

#[test]
fn issue_2_a_matrix_of_integers_is_refused_not_computed() {
    let error = refusal(|b| {
        let at = dims_at(b, "blk.0.ffn_up.weight") + 4 + 16;
        b[at..at + 4].copy_from_slice(&26_u32.to_le_bytes());
    });
    assert_says(&error, &["blk.0.ffn_up.weight", "I32"]);
}

#[test]
fn issue_2_a_type_that_only_ggml_makes_is_named() {
    let error = refusal(|b| {
        let at = dims_at(b, "blk.0.ffn_up.weight") + 4 + 16;
        b[at..at + 4].copy_from_slice(&9_u32.to_le_bytes()); // Q8_1, fewer bytes
    });
    assert_says(&error, &["blk.0.ffn_up.weight is Q8_1", "get an intact file"]);
}

/// Overwrites the four bytes of a key's value.
fn set(bytes: &mut [u8], key: &str, value: [u8; 4]) {
    // The type (u32 or f32) follows, which longer keys with this beginning do not have there.
    let typed = |ty: u8| [key.as_bytes(), &[ty, 0, 0, 0]].concat();
    let place = |text: &[u8]| bytes.windows(text.len()).position(|w| w == text);
    let at = place(&typed(4)).or(place(&typed(6))).unwrap_or_else(|| panic!("no {key}")) + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&value);
}

#[test]
fn issue_2_a_files_bad_setting_names_file_and_key() {
    let whole = |n: u32| n.to_le_bytes();
    let real = |x: f32| x.to_le_bytes();
    for (key, value, words) in [
        ("diffusion.eb_max_steps", whole(0), "is not in 1..=4096"),
        ("diffusion.eb_t_min", real(-1.0), "is not above 0"),
        ("diffusion.eb_t_max", real(0.1), "from t_min up"),
        ("diffusion.eb_entropy_bound", real(-2.0), "0 or more"),
        ("diffusion.canvas_length", whole(65536), "holds no prompt and a canvas of 65536"),
        ("diffusion-gemma.context_length", whole(8), "holds no prompt and a canvas of 8"),
        ("diffusion-gemma.final_logit_softcapping", real(-1.0), "is -1: it must be above 0"),
        ("diffusion-gemma.embedding_length", whole(0), "is 0, not in 1..="),
        ("diffusion-gemma.attention.sliding_window", whole(0), "is 0"),
        ("diffusion-gemma.attention.layer_norm_rms_epsilon", real(2.0), "not between 0 and 1"),
    ] {
        let error = refusal(|b| set(b, key, value));
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        let named = if key == "diffusion.canvas_length" { "diffusion-gemma.context_length" } else { key };
        assert_says(&error, &["Umlaut", named, words, "get an intact file or another model"]);
    }
}

#[test]
fn issue_2_rope_dimensions_beyond_the_head_are_refused() {
    for bad in [0_u32, 31, 4096] {
        let error = refusal(|b| {
            let at = find(b, "rope.dimension_count_swa") + "rope.dimension_count_swa".len() + 4;
            b[at..at + 4].copy_from_slice(&bad.to_le_bytes());
        });
        assert_says(&error, &["rope.dimension_count_swa", &bad.to_string()]);
    }
}

#[test]
fn issue_2_scales_that_nobody_applies_are_refused() {
    // The layer's per-expert scale under another name, as a file of a type with side scales would have it.
    let error = refusal(|b| replace(b, "blk.0.ffn_down_exps.scale", "blk.0.ffn_down_exqs.scale"));
    assert_says(&error, &["blk.0.ffn_down_exqs.scale", "does not apply"]);
}

#[test]
fn nan_weights_are_refused_at_load() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, fixture()).unwrap();
    let info = Gguf::open(&path).unwrap().tensor("blk.1.ffn_up.weight").unwrap().clone();
    let error = refusal(|b| b[info.offset as usize + 400..][..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    assert_says(&error, &["blk.1.ffn_up.weight", "NaN"]);
}

#[test]
fn zero_heads_and_mismatched_layers_are_refused() {
    let error = refusal(|b| {
        let at = find(b, "attention.head_count\u{4}"); // the key ends, its type (u32 = 4) follows
        let at = at + "attention.head_count".len() + 4;
        b[at..at + 4].copy_from_slice(&3_u32.to_le_bytes());
    });
    assert_says(&error, &["3 heads"]);
}

#[test]
fn truncated_folder_empty_and_missing() {
    assert_says(&refusal(|b| b.truncate(b.len() - 1000)), &["are left in the file"]);
    assert_says(&refusal(Vec::clear), &["empty"]);
    let dir = TempDir::new().unwrap();
    let error = Engine::load(params(dir.path().to_owned())).err().unwrap();
    assert_says(&error, &[&dir.path().display().to_string()]);
    let missing = dir.path().join("nowhere.gguf");
    assert_says(&Engine::load(params(missing.clone())).err().unwrap(), &[&missing.display().to_string()]);
}

#[test]
fn parameters_that_cannot_be_had() {
    let refused = |change: &dyn Fn(&mut EngineParams)| {
        let mut params = EngineParams::default();
        change(&mut params);
        Engine::load(params).err().unwrap_or_else(|| panic!("accepted")).to_string()
    };
    let device = refused(&|p| p.device = Some("CUDA7".into()));
    assert!(device.contains("CUDA7") && device.contains("CPU"), "{device}");
    let context = refused(&|p| p.context = 1 << 20);
    assert!(context.contains("1048576") && context.contains("4096"), "{context}");
    let short = refused(&|p| p.context = 64);
    assert!(short.contains("64"), "{short}");
    for threads in [1 << 16, usize::MAX] {
        let error = refused(&|p| p.threads = threads);
        assert!(error.contains(&format!("bad threads: {threads} is not in 0..=")), "{error}");
    }
    assert!(refused(&|p| p.lanes = 0).contains("1..=64"));
    assert!(refused(&|p| p.lanes = 65).contains("1..=64"));
    assert!(refused(&|p| p.level = dllm_engine::Level::TopK).contains("topk"));
    assert!(refused(&|p| (p.level, p.kv) = (dllm_engine::Level::Reference, dllm_engine::KvType::F16)).contains("F32"));
    // 64 lanes of 512-token contexts of this tiny model fit anywhere; a plan of a larger one says both numbers.
    let plan = Engine::plan(&EngineParams::default()).unwrap();
    assert!(plan.needed() > 0 && plan.free > plan.needed() && plan.fits());
    assert!(plan.weights_mapped > 6 << 20, "weights are mapped on the CPU: {plan:?}");
}

/// The fixture, which says that it may read a billion tokens.
fn boundless(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("boundless.gguf");
    let mut bytes = fixture();
    let at = find(&bytes, "context_length") + "context_length".len() + 4; // behind the key and its type
    bytes[at..at + 4].copy_from_slice(&(1_u32 << 30).to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn issue_2_a_context_larger_than_memory_names_both_numbers() {
    let dir = TempDir::new().unwrap();
    let params = EngineParams { context: 1 << 30, ..params(boundless(&dir)) };
    let plan = Engine::plan(&params).unwrap();
    assert!(!plan.fits() && plan.cache > 1 << 36, "{plan:?}");
    let Err(error) = Engine::load(params) else { panic!("it was loaded") };
    let Error::OutOfMemory { needed, free, .. } = error else { panic!("{error:?}") };
    assert!(needed == plan.needed() && free > 0 && free < needed);
    assert_says(&error, &["needs", "free", "smaller context", "1073741824 tokens"]);
}

#[test]
fn two_engines_live_in_one_process_and_move_between_threads() {
    let load = || Engine::load(EngineParams { threads: 1, ..EngineParams::default() }).unwrap();
    let (mut a, b) = (load(), load());
    let ask = |engine: &mut Engine| {
        let request = dllm_engine::Request::new("86 + 45 =").seed(3).max_tokens(64);
        engine.generate(&request, &mut |_| dllm_engine::Control::Continue).unwrap().text
    };
    let other = std::thread::spawn(move || {
        let mut b = b;
        ask(&mut b)
    });
    assert_eq!(ask(&mut a), "131");
    assert_eq!(other.join().unwrap(), "131");
}
