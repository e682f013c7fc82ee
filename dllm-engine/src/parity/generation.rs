//! Checks of whole generations: the sampler alone on recorded logits, and the engine on its own from recorded noise.

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use crate::denoise::{DenoiseSettings, Lanes, NoText, Work};
use crate::error::{Error, Result};
use crate::event::{Control, Event};
use crate::kernels::position_stats::position_stats;
use crate::model::{Forward, Position};
use crate::parity::Limits;
use crate::parity::fixtures::{Fixtures, GenerationCase, GenerationConfig};
use crate::parity::report::Report;
use crate::rng::{RecordedCanvas, RecordedNoise};
use crate::sampler::{self, StepView};

fn settings(case: &GenerationCase) -> DenoiseSettings {
    let c = &case.config;
    DenoiseSettings {
        max_steps: c.max_denoising_steps,
        t_min: c.t_min,
        t_max: c.t_max,
        entropy_bound: c.entropy_bound,
        stability_threshold: Some(c.stability_threshold),
        confidence_threshold: Some(c.confidence_threshold),
    }
}

/// Recorded logits, uniform numbers and fresh tokens in; entropy, drawn, accepted, next canvas and argmax out.
pub fn sampler_alone(fixtures: &Fixtures, report: &mut Report<'_>) -> Result<()> {
    for case in &fixtures.generations {
        let settings = settings(case);
        let mut sampler = (sampler::by_name("entropy-bound")?.make)(&settings);
        for (c, canvas) in case.canvases.iter().enumerate() {
            let key = |name: &str| format!("gen.{}.c{c}.{name}", case.name);
            let label = |what: &str| format!("{} canvas {c} sampler {what}", case.name);
            let (logits, u) = (fixtures.f32(&key("logits"))?, fixtures.f32(&key("u"))?);
            let (input, renoise) = (fixtures.tokens(&key("canvas_in"))?, fixtures.tokens(&key("renoise"))?);
            let width = logits.shape[2];
            let (mut entropy, mut drawn, mut argmax, mut accepted, mut output) =
                (vec![], vec![], vec![], vec![], vec![]);
            for (n, record) in canvas.steps.iter().enumerate() {
                let rows = logits.at(n).chunks_exact(width).zip(u.at(n));
                let positions: Vec<Position> =
                    rows.map(|(row, &u)| position_stats(row, None, record.temperature, u)).collect();
                let fixed = vec![false; positions.len()];
                let view = StepView {
                    steps_left: settings.max_steps - n as u32,
                    max_steps: settings.max_steps,
                    canvas: input.at(n),
                    positions: &positions,
                    fixed: &fixed,
                };
                let mut flags = fixed.clone();
                sampler.accept(&view, &mut flags);
                for (i, p) in positions.iter().enumerate() {
                    entropy.push(p.entropy);
                    drawn.push(p.drawn);
                    argmax.push(p.argmax);
                    output.push(if flags[i] { p.drawn } else { renoise.at(n)[i] });
                }
                accepted.extend(flags);
            }
            report.close(label("entropy"), &entropy, &fixtures.f32(&key("entropy"))?.values, 1e-4);
            report.equal(label("drawn"), &drawn, &fixtures.tokens(&key("sampled"))?.values);
            report.equal(label("argmax"), &argmax, &fixtures.tokens(&key("argmax"))?.values);
            report.equal(label("accepted"), &accepted, &fixtures.flags(&key("accepted"))?.values);
            report.equal(label("next canvas"), &output, &fixtures.tokens(&key("canvas_out"))?.values);
        }
    }
    Ok(())
}

/// Steps of one canvas as the engine took them.
#[derive(Default)]
struct Seen {
    argmax: Vec<u32>,
    accepted: Vec<bool>,
    output: Vec<u32>,
    steps: usize,
}

fn recorded_noise(fixtures: &Fixtures, case: &GenerationCase) -> Result<RecordedNoise> {
    let canvases = (0..case.canvases.len())
        .map(|c| {
            let key = |name: &str| format!("gen.{}.c{c}.{name}", case.name);
            let (u, renoise) = (fixtures.f32(&key("u"))?, fixtures.tokens(&key("renoise"))?);
            Ok(RecordedCanvas {
                init: fixtures.tokens(&key("init"))?.values,
                uniform: (0..u.shape[0]).map(|n| u.at(n).to_vec()).collect(),
                renoise: (0..renoise.shape[0]).map(|n| renoise.at(n).to_vec()).collect(),
            })
        })
        .collect::<Result<_>>()?;
    Ok(RecordedNoise::new(canvases))
}

/// Prompt, settings and noise in; every step, the number of steps and the final tokens out. All cases run at once on the
/// network's lanes, so that they are each other's neighbours.
pub fn autonomous<F: Forward>(network: F, fixtures: &Fixtures, limits: &Limits, report: &mut Report<'_>) -> Result<F> {
    let least = limits.gpu.map(|gpu| gpu.margins);
    let eligible = |case: &&GenerationCase| case.margins.wider_than(least);
    let cases: Vec<_> = fixtures.generations.iter().filter(eligible).collect();
    let mut lanes = Lanes::new(network, 8);
    let count = lanes.shape().lanes;
    let mut owner: Vec<usize> = vec![0; count];
    let mut seen: Vec<Vec<Seen>> = cases.iter().map(|_| Vec::new()).collect();
    let mut answers: Vec<Vec<u32>> = vec![Vec::new(); seen.len()];
    let mut waiting = cases.iter().copied().enumerate();
    loop {
        while lanes.free() > 0
            && let Some((i, case)) = waiting.next()
        {
            let settings = settings(case);
            let work = Work {
                prompt: fixtures.tokens(&format!("gen.{}.prompt", case.name))?.values,
                max_tokens: case.config.max_new_tokens.next_multiple_of(lanes.shape().canvas),
                noise: Box::new(recorded_noise(fixtures, case)?),
                sampler: (sampler::by_name("entropy-bound")?.make)(&settings),
                settings,
                text: Box::new(NoText),
                pins: Vec::new(),
                eog: Arc::from(&case.config.eos_token_id[..]),
            };
            owner[lanes.admit(work)?] = i;
        }
        if lanes.running() == 0 {
            break;
        }
        let finished = lanes.step(&mut |lane, event| {
            if let Event::Step(step) = event {
                let canvases = &mut seen[owner[lane]];
                if canvases.len() <= step.canvas {
                    canvases.resize_with(step.canvas + 1, Seen::default);
                }
                let s = &mut canvases[step.canvas];
                s.argmax.extend(step.argmax);
                s.accepted.extend(step.accepted);
                s.output.extend(step.output);
                s.steps += 1;
            }
            Control::Continue
        });
        for done in finished {
            answers[owner[done.lane]] = done.result?.tokens;
        }
    }
    for (i, case) in cases.iter().copied().enumerate() {
        check_case(fixtures, case, count, &seen[i], &answers[i], report)?;
    }
    Ok(lanes.into_forward())
}

fn check_case(
    fixtures: &Fixtures,
    case: &GenerationCase,
    lanes: usize,
    seen: &[Seen],
    answer: &[u32],
    report: &mut Report<'_>,
) -> Result<()> {
    for (c, canvas) in case.canvases.iter().enumerate() {
        let key = |name: &str| format!("gen.{}.c{c}.{name}", case.name);
        let label = |what: &str| format!("{} canvas {c} alone {what}, lanes {lanes}", case.name);
        let nothing = Seen::default();
        let s = seen.get(c).unwrap_or(&nothing);
        report.equal(label("steps"), &[s.steps], &[canvas.n_steps]);
        report.equal(label("argmax"), &s.argmax, &fixtures.tokens(&key("argmax"))?.values);
        report.equal(label("accepted"), &s.accepted, &fixtures.flags(&key("accepted"))?.values);
        report.equal(label("next canvas"), &s.output, &fixtures.tokens(&key("canvas_out"))?.values);
    }
    report.equal(format!("{} canvases, lanes {lanes}", case.name), &[seen.len()], &[case.canvases.len()]);
    let prompt = fixtures.tokens(&format!("gen.{}.prompt", case.name))?.values.len();
    let sequence = fixtures.tokens(&format!("gen.{}.sequence", case.name))?.values;
    let tail = sequence.get(prompt..).unwrap_or_default();
    let end = tail.iter().position(|t| case.config.eos_token_id.contains(t)).unwrap_or(tail.len());
    report.equal(format!("{} final tokens, lanes {lanes}", case.name), answer, &tail[..end]);
    Ok(())
}

/// The recorded traces of the trained model (a JSON file with prompts, noise and choices): every step, exactly.
pub fn traces<F: Forward>(network: F, path: &Path, report: &mut Report<'_>) -> Result<F> {
    let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let traces: Traces = serde_json::from_slice(&bytes).map_err(|e| Error::file(path, format!("not traces: {e}")))?;
    let mut lanes = Lanes::new(network, usize::MAX);
    let g = &traces.generation;
    let settings = DenoiseSettings {
        max_steps: g.max_denoising_steps,
        t_min: g.t_min,
        t_max: g.t_max,
        entropy_bound: g.entropy_bound,
        stability_threshold: Some(g.stability_threshold),
        confidence_threshold: Some(g.confidence_threshold),
    };
    for (i, trace) in traces.prompts.iter().enumerate() {
        let noise = trace.canvases.iter().map(|c| RecordedCanvas {
            init: c.init.clone(),
            uniform: c.steps.iter().map(|s| s.u.clone()).collect(),
            renoise: c.steps.iter().map(|s| s.renoise.clone()).collect(),
        });
        let work = Work {
            prompt: trace.prompt_ids.clone(),
            max_tokens: g.max_new_tokens,
            noise: Box::new(RecordedNoise::new(noise.collect())),
            sampler: (sampler::by_name("entropy-bound")?.make)(&settings),
            settings: settings.clone(),
            text: Box::new(NoText),
            pins: Vec::new(),
            eog: Arc::from(&g.eos_token_id[..]),
        };
        let mut seen = Vec::new();
        let done = lanes.generate(work, &mut |event| {
            if let Event::Step(s) = event {
                seen.push((s.argmax.to_vec(), s.accepted.to_vec(), s.output.to_vec(), s.entropy.to_vec()));
            }
            Control::Continue
        })?;
        let want: Vec<_> = trace.canvases.iter().flat_map(|c| &c.steps).collect();
        report.equal(format!("trace {i} steps"), &[seen.len()], &[want.len()]);
        for (n, (got, want)) in seen.iter().zip(&want).enumerate() {
            let accepted: Vec<bool> = want.accepted.iter().map(|&a| a != 0).collect();
            report.equal(format!("trace {i} step {n} argmax"), &got.0, &want.argmax);
            report.equal(format!("trace {i} step {n} accepted"), &got.1, &accepted);
            report.equal(format!("trace {i} step {n} next canvas"), &got.2, &want.canvas_out);
            report.close(format!("trace {i} step {n} entropy"), &got.3, &want.entropy, 1e-3);
        }
        let tail = &trace.sequence[trace.prompt_ids.len().min(trace.sequence.len())..];
        let end = tail.iter().position(|t| g.eos_token_id.contains(t)).unwrap_or(tail.len());
        report.equal(format!("trace {i} final tokens"), &done.tokens, &tail[..end]);
    }
    Ok(lanes.into_forward())
}

#[derive(Deserialize)]
struct Traces {
    generation: GenerationConfig,
    prompts: Vec<Trace>,
}

#[derive(Deserialize)]
struct Trace {
    prompt_ids: Vec<u32>,
    sequence: Vec<u32>,
    canvases: Vec<TraceCanvas>,
}

#[derive(Deserialize)]
struct TraceCanvas {
    init: Vec<u32>,
    steps: Vec<TraceStep>,
}

#[derive(Deserialize)]
struct TraceStep {
    u: Vec<f32>,
    renoise: Vec<u32>,
    argmax: Vec<u32>,
    entropy: Vec<f32>,
    accepted: Vec<u8>,
    canvas_out: Vec<u32>,
}
