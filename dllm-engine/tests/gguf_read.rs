//! Good files: everything written is read back, and the reference's fixture files hold the numbers they should.

#[path = "common/gguf.rs"]
mod gguf_file;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use dllm_engine::gguf::{GgmlType, Gguf, Header, TensorInfo, Value};
use gguf_file::{ARRAY, GgufFile, STR, array, floats, string};
use half::{bf16, f16};

fn header(file: &GgufFile) -> Header {
    let bytes = file.bytes();
    Header::read(&bytes[..], bytes.len() as u64, Path::new("good.gguf")).expect("a good file")
}

#[test]
fn metadata_comes_back_as_written() {
    let meta = header(&GgufFile::sample()).meta;
    assert_eq!(meta.str("general.architecture").unwrap(), "diffusion-gemma");
    assert_eq!(meta.u32("a.u8").unwrap(), 200);
    assert_eq!(meta.get("a.i64").and_then(Value::as_integer), Some(-3));
    assert_eq!((meta.f32("a.f32").unwrap(), meta.f32("a.f64").unwrap()), (1e-6, 0.25));
    assert!(meta.bool("a.yes").unwrap());
    assert_eq!(meta.array_u32("a.kv").unwrap(), [8, 8, 2]);
    assert_eq!(meta.array_i32("a.kv").unwrap(), [8, 8, 2]);
    assert_eq!(meta.per_layer_u32("a.kv", 3).unwrap(), [8, 8, 2]);
    assert_eq!(meta.per_layer_u32("a.u8", 2).unwrap(), [200, 200]);
    assert_eq!(meta.array_bool("a.pattern").unwrap(), [true, true, false]);
    let scores = meta.array_f32("a.scores").unwrap();
    assert!(scores.len() == 2 && scores[0] == 0.5 && scores[1].is_nan());
    let tokens = meta.array_str("a.tokens").unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["<pad>", "", "\u{2581}w", "漢"]);
    assert_eq!((tokens.get(3), tokens.get(4)), (Some("漢"), None));
    assert_eq!(meta.get("a.nested").unwrap().to_string(), r#"[[1, 2], ["x"]]"#);
    assert_eq!(meta.u32_opt("a.none").unwrap(), None);
    assert_eq!(meta.iter().count(), 12);
}

#[test]
fn version_2_reads_like_version_3() {
    let header = header(&GgufFile { version: 2, ..GgufFile::sample() });
    assert_eq!((header.tensors.len(), header.meta.iter().count()), (3, 12));
}

#[test]
fn tensors_come_back_as_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sample.gguf");
    fs::write(&path, GgufFile::sample().bytes()).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let shapes: Vec<_> = gguf.tensors().iter().map(|t| (t.name.as_str(), t.shape, t.ty.name(), t.bytes)).collect();
    let expected = [
        ("a.weight", [64, 1, 1, 1], "F32".to_owned(), 256),
        ("b.weight", [8, 8, 1, 1], "F16".to_owned(), 128),
        ("c.weight", [32, 2, 1, 1], "Q8_0".to_owned(), 68),
    ];
    assert_eq!(shapes, expected);
    assert_eq!(numbers(&gguf, "a.weight"), (0..64).map(|i| i as f32).collect::<Vec<_>>());
    assert_eq!(numbers(&gguf, "b.weight"), [1.0; 64]);
    let data = gguf.file_data(0).unwrap();
    assert_eq!(data.as_ptr().addr() % 32, 0);
    let c = gguf.tensor("c.weight").unwrap();
    assert_eq!(&data[(c.offset - gguf.data_start(0).unwrap()) as usize..][..68], gguf.data(c).unwrap());
}

#[test]
fn a_wider_alignment_is_followed() {
    let file = GgufFile { alignment: 256, ..GgufFile::new() }.u32("general.alignment", 256);
    let file = file.tensor("a", &[1], 0, &floats(&[7.0])).tensor("b", &[1], 0, &floats(&[8.0]));
    let header = header(&file);
    let offsets: Vec<_> = header.tensors.iter().map(|t| t.offset - header.data_start).collect();
    assert_eq!((header.data_start % 256, offsets), (0, vec![0, 256]));
}

#[test]
fn a_file_without_tensors_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vocab.gguf");
    fs::write(&path, GgufFile::new().str("general.architecture", "x").header()).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!((gguf.tensors().len(), gguf.main_type(), gguf.quantization()), (0, None, "none".into()));
    assert!(gguf.file_data(0).unwrap().is_empty());
}

#[test]
fn quantization_is_the_file_type_or_what_most_bytes_are() {
    let name = |file: GgufFile| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        fs::write(&path, file.bytes()).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        (gguf.quantization(), gguf.main_type().unwrap().name())
    };
    let tensors = || GgufFile::new().tensor("a", &[8], 0, &[0; 32]).tensor("b", &[64], 1, &[0; 128]);
    assert_eq!(name(tensors()), ("F16".into(), "F16".into()));
    assert_eq!(name(tensors().u32("general.file_type", 15)), ("Q4_K_M".into(), "F16".into()));
    assert_eq!(name(tensors().u32("general.file_type", 9999)), ("F16".into(), "F16".into()));
}

#[test]
fn a_vocabulary_of_full_size_reads_back() {
    const TOKENS: usize = 262_144;
    let texts: Vec<String> = (0..TOKENS).map(|i| format!("\u{2581}w{i}")).collect();
    let elements: Vec<u8> = texts.iter().flat_map(string).collect();
    let file = GgufFile::new().key("tokens", ARRAY, &array(STR, TOKENS as u64, &elements));
    let meta = header(&file).meta;
    assert!(meta.array_str("tokens").unwrap().iter().eq(texts.iter().map(String::as_str)));
    let shown = meta.get("tokens").unwrap().to_string();
    assert!(shown.starts_with("[\"\u{2581}w0\", ") && shown.ends_with(", ... 262144 in all]"), "{shown}");
}

/// A static whose bytes are aligned as embedded models must be.
#[repr(align(64))]
struct Aligned([u8; 96]);

#[test]
fn an_embedded_file_opens() {
    let mut image = Aligned([0; 96]);
    let bytes = GgufFile::new().tensor("a", &[4], 0, &floats(&[1.0, 2.0, 3.0, 4.0])).bytes();
    image.0.copy_from_slice(&bytes);
    let image: &'static Aligned = Box::leak(Box::new(image));
    let gguf = Gguf::from_static(&image.0, "embedded").unwrap();
    assert_eq!(numbers(&gguf, "a"), [1.0, 2.0, 3.0, 4.0]);
    assert!(gguf.check_unchanged().is_ok());
}

/// A tensor's numbers, for the types that tests need.
fn numbers(gguf: &Gguf, name: &str) -> Vec<f32> {
    let tensor = gguf.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"));
    let data = gguf.data(tensor).unwrap();
    let half = |convert: fn([u8; 2]) -> f32| data.as_chunks().0.iter().map(|c| convert(*c)).collect();
    match tensor.ty {
        GgmlType::F32 => data.as_chunks().0.iter().map(|c| f32::from_le_bytes(*c)).collect(),
        GgmlType::F16 => half(|c| f16::from_le_bytes(c).to_f32()),
        GgmlType::BF16 => half(|c| bf16::from_le_bytes(c).to_f32()),
        GgmlType::Q8_0 => data
            .as_chunks::<34>()
            .0
            .iter()
            .flat_map(|block| {
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                block[2..].iter().map(move |q| scale * f32::from(*q as i8))
            })
            .collect(),
        other => panic!("{other} is not unpacked here"),
    }
}

/// A file of the reference beside the project, or `None` (said on standard error) where that is not there.
fn reference(file: &str) -> Option<PathBuf> {
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    if !shared.is_dir() {
        eprintln!("skipped: no reference files in {}", shared.display());
        return None;
    }
    Some(shared.join(file))
}

const REFERENCE_FILES: [(&str, &str); 7] = [
    ("oracle/nano/model.gguf", "F32"),
    ("oracle/nano/model-f16.gguf", "F16"),
    ("oracle/nano/model-bf16.gguf", "BF16"),
    ("oracle/tiny/model.gguf", "F32"),
    ("oracle/small/model.gguf", "F32"),
    ("tiny/dllm-tiny-f16.gguf", "F16"),
    ("tiny/dllm-tiny-q8_0.gguf", "Q8_0"),
];

#[test]
fn reference_files_open_with_finite_weights() {
    for (file, quantization) in REFERENCE_FILES {
        let Some(path) = reference(file) else { return };
        let gguf = Gguf::open(path).unwrap();
        let meta = gguf.meta();
        assert_eq!(
            (meta.str("general.architecture").unwrap(), gguf.quantization().as_str()),
            ("diffusion-gemma", quantization)
        );
        let layers = meta.u32("diffusion-gemma.block_count").unwrap();
        let sliding = meta.array_bool("diffusion-gemma.attention.sliding_window_pattern").unwrap();
        let kv_heads = meta.per_layer_u32("diffusion-gemma.attention.head_count_kv", layers).unwrap();
        assert_eq!((sliding.len(), kv_heads.len()), (layers as usize, layers as usize));
        let (tokens, width) =
            (meta.array_str("tokenizer.ggml.tokens").unwrap(), meta.u64("diffusion-gemma.embedding_length").unwrap());
        let embedding = gguf.tensor("token_embd.weight").unwrap();
        assert_eq!(embedding.shape, [width, tokens.len() as u64, 1, 1]);
        assert_eq!((tokens.get(0), tokens.get(1)), (Some("<pad>"), Some("<eos>")));
        for tensor in gguf.tensors() {
            gguf.check_finite(tensor).unwrap();
        }
        // The last layer is a global one: a quarter of its head turns, the rest has frequencies too low to matter.
        let freqs = numbers(&gguf, "rope_freqs.weight");
        let (turning, still) = freqs.split_at(freqs.len() / 4);
        assert!(turning.iter().all(|f| *f == 1.0) && still.iter().all(|f| *f == 1e30), "{file}: {freqs:?}");
    }
}

/// The reference recorded the decoder's input at the first step: the canvas tokens' embeddings, scaled and normed without
/// a weight. The embedding table read here must give the same numbers.
#[test]
fn embeddings_are_those_the_reference_used() {
    for fixture in ["oracle/nano", "oracle/tiny", "oracle/small"] {
        let Some(folder) = reference(fixture) else { return };
        let gguf = Gguf::open(folder.join("model.gguf")).unwrap();
        let eps = gguf.meta().f32("diffusion-gemma.attention.layer_norm_rms_epsilon").unwrap();
        let table = numbers(&gguf, "token_embd.weight");
        let width = gguf.tensor("token_embd.weight").unwrap().shape[0] as usize;
        let bytes = fs::read(folder.join("fixtures.safetensors")).unwrap();
        let arrays = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| arrays.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let canvas: Vec<_> = words("fwd.P1.canvas").into_iter().map(|w| i32::from_le_bytes(w) as usize).collect();
        let expected: Vec<_> = words("fwd.P1.dec0.embed").into_iter().map(f32::from_le_bytes).collect();
        assert_eq!(expected.len(), canvas.len() * width);
        for (token, expected) in canvas.iter().zip(expected.chunks(width)) {
            let scaled: Vec<f32> = table[token * width..][..width].iter().map(|v| v * (width as f32).sqrt()).collect();
            let square = scaled.iter().map(|v| v * v).sum::<f32>() / width as f32;
            for (value, expected) in scaled.iter().zip(expected) {
                let value = value / (square + eps).sqrt();
                assert!((value - expected).abs() < 1e-5, "{fixture}, token {token}: {value} is not {expected}");
            }
        }
    }
}

/// The same weights in several types: each number is the F32 one, rounded.
#[test]
fn types_of_one_model_agree() {
    let Some(folder) = reference("oracle/nano") else { return };
    let exact = Gguf::open(folder.join("model.gguf")).unwrap();
    for (file, ty, error) in [("model-f16.gguf", GgmlType::F16, 4.9e-4), ("model-bf16.gguf", GgmlType::BF16, 3.91e-3)] {
        let rounded = Gguf::open(folder.join(file)).unwrap();
        let by_name: HashMap<&str, &TensorInfo> = rounded.tensors().iter().map(|t| (t.name.as_str(), t)).collect();
        assert!(rounded.tensors().iter().any(|t| t.ty == ty) && by_name.len() == exact.tensors().len());
        for tensor in exact.tensors() {
            assert_eq!(tensor.shape, by_name[tensor.name.as_str()].shape);
            for (a, b) in numbers(&exact, &tensor.name).into_iter().zip(numbers(&rounded, &tensor.name)) {
                assert!((a - b).abs() <= a.abs() * error + 6e-8, "{file}, {}: {b} is not {a}", tensor.name);
            }
        }
    }
}

/// Blocks of 32 with one scale: each number is at most half a step of its block's scale from the F16 one.
#[test]
fn q8_0_agrees_with_f16() {
    let Some(folder) = reference("tiny") else { return };
    let exact = Gguf::open(folder.join("dllm-tiny-f16.gguf")).unwrap();
    let rounded = Gguf::open(folder.join("dllm-tiny-q8_0.gguf")).unwrap();
    let quantized: Vec<_> = rounded.tensors().iter().filter(|t| t.ty == GgmlType::Q8_0).collect();
    assert!(!quantized.is_empty());
    for tensor in quantized {
        let (a, b) = (numbers(&exact, &tensor.name), numbers(&rounded, &tensor.name));
        for (a, b) in a.chunks(32).zip(b.chunks(32)) {
            let step = a.iter().fold(0f32, |most, v| most.max(v.abs())) / 127.0;
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= step * 0.57), "{}: {a:?} {b:?}", tensor.name);
        }
    }
}

/// The fuzzing corpus is not stale: its files are what their names say.
#[test]
fn the_corpus_reads() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/gguf");
    let names = ["aligned_256", "overlapping", "part_1_of_2", "version_2", "vocabulary_only", "whole"];
    for name in names {
        let path = folder.join(name);
        let bytes = fs::read(&path).unwrap();
        let result = Header::read(&bytes[..], bytes.len() as u64, &path);
        assert_eq!(result.is_ok(), name != "overlapping", "{name}: {:?}", result.err());
    }
}
