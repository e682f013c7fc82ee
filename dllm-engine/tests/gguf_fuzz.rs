//! Random damage to a good file: the reader answers with a header or an error, and takes little memory. This file has one
//! test, so that the memory it measures is its own.

#[path = "common/gguf.rs"]
mod gguf_file;

use std::path::Path;

use dllm_engine::gguf::Header;
use gguf_file::GgufFile;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};

/// One piece of damage.
#[derive(Debug, Clone)]
enum Damage {
    Flip(Index, u8),
    Word(Index, u64),
    Truncate(Index),
    Copy(Index, Index, usize),
    Insert(Index, Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    let word = prop_oneof![Just(u64::MAX), Just(1 << 63), Just(1 << 32), Just(0), any::<u64>(), 0..100u64];
    prop_oneof![
        4 => (any::<Index>(), 1..=u8::MAX).prop_map(|(at, bits)| Damage::Flip(at, bits)),
        4 => (any::<Index>(), word).prop_map(|(at, word)| Damage::Word(at, word)),
        1 => any::<Index>().prop_map(Damage::Truncate),
        1 => (any::<Index>(), any::<Index>(), 1..100usize).prop_map(|(from, to, len)| Damage::Copy(from, to, len)),
        1 => (any::<Index>(), vec(any::<u8>(), 1..40)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
    ]
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let len = bytes.len();
        match self {
            Self::Flip(at, bits) => bytes[at.index(len)] ^= bits,
            Self::Word(at, word) => {
                let at = at.index(len);
                let room = (len - at).min(8);
                bytes[at..at + room].copy_from_slice(&word.to_le_bytes()[..room]);
            }
            Self::Truncate(at) => bytes.truncate(at.index(len)),
            Self::Copy(from, to, n) => {
                let (from, to) = (from.index(len), to.index(len));
                bytes.copy_within(from..from + (*n).min(len - from.max(to)), to);
            }
            Self::Insert(at, new) => drop(bytes.splice(at.index(len)..at.index(len), new.iter().copied())),
        }
    }
}

/// Reads damaged bytes and, where they are accepted, checks the promises that everything else builds on.
fn read(bytes: &[u8]) -> Result<bool, TestCaseError> {
    let header = match Header::read(bytes, bytes.len() as u64, Path::new("fuzz.gguf")) {
        Ok(header) => header,
        Err(e) => {
            prop_assert!(e.to_string().contains("fuzz.gguf: "), "{e}");
            return Ok(false);
        }
    };
    let mut end = header.data_start;
    let mut tensors = header.tensors;
    tensors.sort_by_key(|t| t.offset);
    for tensor in tensors {
        prop_assert!(tensor.offset >= end && tensor.offset % 32 == 0, "{tensor:?}");
        prop_assert_eq!(tensor.ty.bytes(tensor.elements()), Some(tensor.bytes));
        prop_assert!(tensor.bytes > 0);
        end = tensor.offset + tensor.bytes;
        prop_assert!(end <= bytes.len() as u64);
    }
    for (key, value) in header.meta.iter() {
        prop_assert!(!key.is_empty() && value.to_string().len() < 1 << 20);
    }
    Ok(true)
}

/// Most address space this process has had, in bytes: it counts what was allocated but never touched, too.
#[cfg(target_os = "linux")]
fn peak_address_space() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).expect("VmPeak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

#[test]
fn damage_never_panics_or_takes_much_memory() {
    #[cfg(target_os = "linux")]
    let before = peak_address_space();
    let good = GgufFile::sample().bytes();
    let (mut accepted, mut refused) = (0, 0);
    let config = Config { cases: 20_000, failure_persistence: None, ..Config::default() };
    let counts = std::cell::RefCell::new((&mut accepted, &mut refused));
    TestRunner::new(config)
        .run(&vec(damage(), 1..4), |damages| {
            let mut bytes = good.clone();
            damages.iter().for_each(|damage| damage.apply(&mut bytes));
            let mut counts = counts.borrow_mut();
            if read(&bytes)? {
                *counts.0 += 1
            } else {
                *counts.1 += 1
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
    // Both ways out were taken: the damage is neither harmless nor always noticed at the first byte.
    assert!(accepted > 1000 && refused > 1000, "{accepted} accepted, {refused} refused");
    #[cfg(target_os = "linux")]
    assert!(peak_address_space() - before < 1 << 30, "{} bytes more", peak_address_space() - before);
}
