//! Checks of the forward passes: cache, decoder input, routing, logits, teacher-forced steps.

use crate::error::Result;
use crate::model::{DenoiseLane, Forward, Network, Position, PrefillLane};
use crate::parity::Limits;
use crate::parity::fixtures::Fixtures;
use crate::parity::report::Report;

/// How a prompt is brought into the cache: pieces of so many tokens.
pub const PIECES: [usize; 4] = [1, 7, 64, usize::MAX];

/// Lane counts to check, and the lane that carries the case among them.
pub const LANES: [(usize, usize); 3] = [(1, 0), (2, 1), (5, 3)];

/// Prefills `tokens` into `lane` in pieces, from an empty cache.
pub fn prefill(network: &mut Network, lane: usize, tokens: &[u32], piece: usize) -> Result<()> {
    network.truncate(lane, 0);
    tokens
        .chunks(piece.min(tokens.len()).max(1))
        .try_for_each(|tokens| network.prefill(&[PrefillLane { lane, tokens }]))
}

/// A deterministic other prompt and canvas for the neighbours.
fn other(n: usize, vocab: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7919 + salt * 104_729 + 13) % vocab) as u32).collect()
}

/// Fills all lanes but `lane` with other prompts of other lengths.
pub fn fill_neighbours(network: &mut Network, lane: usize, lanes: usize) -> Result<()> {
    let vocab = network.shape().vocab;
    for i in (0..lanes).filter(|&i| i != lane) {
        prefill(network, i, &other(3 + 5 * i, vocab, i), usize::MAX)?;
    }
    Ok(())
}

/// One denoising step of `lane`, with other canvases in the other lanes.
pub fn step(
    network: &mut Network,
    lanes: usize,
    lane: usize,
    canvas: &[u32],
    temperature: f32,
    conditioned: bool,
) -> Result<Vec<Position>> {
    let shape = network.shape();
    let uniform = vec![0.5_f32; shape.canvas];
    let others: Vec<_> = (0..lanes).map(|i| other(shape.canvas, shape.vocab, 100 + i)).collect();
    let batch: Vec<_> = (0..lanes)
        .map(|i| DenoiseLane {
            lane: i,
            canvas: if i == lane { canvas } else { &others[i] },
            temperature: if i == lane { temperature } else { 0.5 },
            uniform: &uniform,
            self_condition: i == lane && conditioned,
        })
        .collect();
    let mut out = Vec::new();
    network.denoise(&batch, &mut out)?;
    Ok(out[lane * shape.canvas..(lane + 1) * shape.canvas].to_vec())
}

/// A tapped result of one lane of the last decoder pass, as F32.
fn tapped(network: &Network, name: &str, lane: usize) -> Vec<f32> {
    words(network, name, lane).into_iter().map(f32::from_bits).collect()
}

fn words(network: &Network, name: &str, lane: usize) -> Vec<u32> {
    let canvas = network.shape().canvas;
    network.tapped(false, name).map_or(Vec::new(), |(row, words)| {
        words.get(lane * canvas * row..(lane + 1) * canvas * row).map(<[u32]>::to_vec).unwrap_or_default()
    })
}

/// softcap * tanh(x / softcap), as the fixtures store logits.
pub fn softcapped(network: &Network, logits: Vec<f32>) -> Vec<f32> {
    match network.family().dims().softcap {
        Some(cap) => logits.into_iter().map(|x| cap * (x / cap).tanh()).collect(),
        None => logits,
    }
}

fn capped_logits(network: &Network, lane: usize) -> Vec<f32> {
    softcapped(network, tapped(network, "logits", lane))
}

/// `fwd.*`: encoder K/V per layer, decoder input, routing and logits without and with self-conditioning.
pub fn forward_cases(
    network: &mut Network,
    fixtures: &Fixtures,
    limits: &Limits,
    lanes: (usize, usize),
    report: &mut Report<'_>,
) -> Result<()> {
    let (lanes, lane) = lanes;
    for (case, settings) in &fixtures.forward {
        let key = |name: &str| format!("fwd.{case}.{name}");
        let (prompt, canvas) = (fixtures.tokens(&key("prompt"))?.values, fixtures.tokens(&key("canvas"))?.values);
        for piece in PIECES.into_iter().filter(|&p| p == usize::MAX || p < prompt.len() || (p == 64 && lanes == 1)) {
            let pieces = if piece == usize::MAX { "all".to_owned() } else { piece.to_string() };
            let label = |what: &str| format!("{case} {what}, pieces {pieces}, lanes {lanes}");
            fill_neighbours(network, lane, lanes)?;
            prefill(network, lane, &prompt, piece)?;
            check_cache(network, fixtures, case, lane, prompt.len(), limits.cache, &label("cache"), report)?;

            step(network, lanes, lane, &canvas, settings.sc_temperature, false)?;
            check_step(network, fixtures, case, "dec0", lane, limits, &label("dec0"), report)?;
            // The reference conditions the second pass on its own first logits.
            let first = fixtures.f32(&key("dec0.logits"))?.values;
            network.condition_on(lane, &first, settings.sc_temperature)?;
            step(network, lanes, lane, &canvas, settings.sc_temperature, true)?;
            check_step(network, fixtures, case, "dec1", lane, limits, &label("dec1"), report)?;
            if fixtures.debug_case.as_deref() == Some(case) && piece == usize::MAX {
                for i in (0..).take_while(|i| fixtures.has(&key(&format!("dec1.h.{i}")))) {
                    let want = fixtures.f32(&key(&format!("dec1.h.{i}")))?.values;
                    report.close(
                        label(&format!("dec1.h.{i}")),
                        &tapped(network, &format!("residual.{i}"), lane),
                        &want,
                        limits.residual,
                    );
                }
            }
        }
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn check_cache(
    network: &Network,
    fixtures: &Fixtures,
    case: &str,
    lane: usize,
    len: usize,
    limit: f64,
    label: &str,
    report: &mut Report<'_>,
) -> Result<()> {
    let layers = (0..).take_while(|i| fixtures.has(&format!("fwd.{case}.enc.k.{i}"))).count();
    for (which, name) in ["k", "v"].into_iter().enumerate() {
        let (mut got, mut want) = (Vec::new(), Vec::new());
        for layer in 0..layers {
            let array = fixtures.f32(&format!("fwd.{case}.enc.{name}.{layer}"))?;
            for position in network.held(layer, lane, len) {
                got.extend(network.cached(layer, which, lane, position)?);
                want.extend_from_slice(array.at(position));
            }
        }
        report.close(format!("{label} {name}"), &got, &want, limit);
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn check_step(
    network: &Network,
    fixtures: &Fixtures,
    case: &str,
    dec: &str,
    lane: usize,
    limits: &Limits,
    label: &str,
    report: &mut Report<'_>,
) -> Result<()> {
    let key = |name: &str| format!("fwd.{case}.{dec}.{name}");
    let embed = tapped(network, "decoder_input", lane);
    report.close(format!("{label} input"), &embed, &fixtures.f32(&key("embed"))?.values, limits.input);
    let array = if limits.gelu16 { "logits_gelu16" } else { "logits" };
    let (logits, expected) = (capped_logits(network, lane), fixtures.f32(&key(array))?.values);
    match limits.gpu {
        Some(gpu) => report.near(format!("{label} logits"), &logits, &expected, gpu.logits),
        None => report.close(format!("{label} logits"), &logits, &expected, limits.logits),
    }
    let (mut got, mut want, mut got_w, mut want_w) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for layer in (0..).take_while(|i| fixtures.has(&key(&format!("route.{i}")))) {
        got.extend(words(network, &format!("route.{layer}"), lane));
        want.extend(fixtures.tokens(&key(&format!("route.{layer}")))?.values);
        got_w.extend(tapped(network, &format!("route_weight.{layer}"), lane));
        want_w.extend(fixtures.f32(&key(&format!("route_w.{layer}")))?.values);
    }
    if !want.is_empty() {
        match limits.gpu {
            Some(gpu) => report.mostly_equal(format!("{label} routing"), &got, &want, gpu.routing),
            None => {
                report.equal(format!("{label} routing"), &got, &want);
                report.close(format!("{label} routing weights"), &got_w, &want_w, limits.route_weight);
            }
        }
    }
    Ok(())
}

/// Every recorded step of every generation, with the reference's canvas and the reference's previous logits.
pub fn teacher_forced(
    network: &mut Network,
    fixtures: &Fixtures,
    limits: &Limits,
    report: &mut Report<'_>,
) -> Result<()> {
    let canvas_len = network.shape().canvas;
    let least = limits.gpu.map(|gpu| gpu.margins);
    for case in fixtures.generations.iter().filter(|case| case.margins.wider_than(least)) {
        let sequence = fixtures.tokens(&format!("gen.{}.sequence", case.name))?.values;
        let mut filled = fixtures.tokens(&format!("gen.{}.prompt", case.name))?.values.len();
        for (c, canvas) in case.canvases.iter().enumerate() {
            let key = |name: &str| format!("gen.{}.c{c}.{name}", case.name);
            let (input, logits) = (fixtures.tokens(&key("canvas_in"))?, fixtures.f32(&key("logits"))?);
            prefill(network, 0, &sequence[..filled], usize::MAX)?;
            let (mut got, mut want) = (Vec::new(), Vec::new());
            for (n, record) in canvas.steps.iter().enumerate() {
                if n > 0 {
                    network.condition_on(0, logits.at(n - 1), canvas.steps[n - 1].temperature)?;
                }
                step(network, 1, 0, input.at(n), record.temperature, n > 0)?;
                got.extend(capped_logits(network, 0));
                want.extend_from_slice(logits.at(n));
            }
            report.close(format!("{} canvas {c} teacher-forced logits", case.name), &got, &want, limits.forced);
            filled += canvas_len;
        }
    }
    Ok(())
}
