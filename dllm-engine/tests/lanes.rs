//! The scheduler: independence of lanes, cache reuse, fairness, failure.

mod common;

use std::collections::HashMap;

use common::{SHAPE, alone, drain, lanes, silent, work};
use dllm_engine::Error;
use dllm_engine::denoise::Lanes;
use dllm_engine::denoise::scripted::{Pass, Scripted, Seen};
use dllm_engine::event::{Control, Event, FinishReason};
use dllm_engine::model::{Forward, Position, Shape};
use proptest::prelude::*;

fn denoised(log: &[Pass]) -> Vec<Vec<usize>> {
    log.iter().filter_map(|pass| if let Pass::Denoise(lanes) = pass { Some(lanes.clone()) } else { None }).collect()
}

#[test]
fn beside_others_a_request_gives_what_it_gives_alone() {
    let prompts: Vec<Vec<u32>> = vec![vec![1, 2, 3], (0..40).collect(), vec![7], vec![1, 2, 9], vec![1, 2, 3]];
    let want: Vec<_> = prompts.iter().zip(0..).map(|(p, k)| alone(work(p, 24, k)).tokens).collect();
    for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]] {
        let mut lanes = lanes(3);
        let (mut waiting, mut on_lane) = (order.to_vec(), HashMap::new());
        waiting.reverse();
        let mut done = 0;
        while done < prompts.len() {
            while lanes.free() > 0
                && let Some(i) = waiting.pop()
            {
                on_lane.insert(lanes.admit(work(&prompts[i], 24, i as u64)).unwrap(), i);
            }
            for finished in lanes.step(&mut |_, _| Control::Continue) {
                let i = on_lane[&finished.lane];
                assert_eq!(finished.result.unwrap().tokens, want[i], "request {i} in order {order:?}");
                done += 1;
            }
        }
    }
}

#[test]
fn a_common_prefix_is_read_once() {
    let prompts: Vec<Vec<u32>> = (0..3).map(|k| (0..40).chain([90 + k]).collect()).collect();
    let want: Vec<_> = prompts.iter().zip(0..).map(|(p, k)| alone(work(p, 8, k)).tokens).collect();
    let mut lanes = Lanes::new(Scripted::made_up(Shape { lanes: 3, ..SHAPE }).logged(), 1000);
    let on: Vec<_> = prompts.iter().zip(0..).map(|(p, k)| lanes.admit(work(p, 8, k)).unwrap()).collect();
    let finished = drain(&mut lanes);
    assert_eq!(finished.len(), 3);
    for f in finished {
        let i = on.iter().position(|lane| *lane == f.lane).unwrap();
        let result = f.result.unwrap();
        assert_eq!(result.tokens, want[i], "request {i}");
        assert_eq!(result.cost.cached_tokens, if i == 0 { 0 } else { 40 }, "request {i}");
    }
    let log = lanes.into_forward().log.unwrap();
    let read = |pass: &Pass| if let Pass::Prefill(parts) = pass { parts.iter().map(|p| p.1).sum() } else { 0 };
    let first: Vec<usize> = log.iter().map(read).filter(|n| *n > 0).take(2).collect();
    assert_eq!(first, [41, 2], "the first prompt, then one token of each of the others");
}

#[test]
fn what_is_no_number_ends_its_lane_only() {
    let script = |seen: &Seen<'_>, out: &mut [Position]| {
        for (i, p) in out.iter_mut().enumerate() {
            let bad = seen.cached[0] == 1 && seen.step == 3 && i == 5;
            *p = Position { argmax: seen.step, entropy: if bad { f32::NAN } else { 1.0 }, ..Position::default() };
        }
        Ok(())
    };
    let mut lanes = Lanes::new(Scripted::new(Shape { lanes: 2, ..SHAPE }, Box::new(script)), 16);
    let bad = lanes.admit(work(&[1], 8, 0)).unwrap();
    let good = lanes.admit(work(&[2], 8, 0)).unwrap();
    let mut finished = drain(&mut lanes);
    finished.sort_by_key(|f| f.lane == good);
    let [first, second] = &finished[..] else { panic!("{finished:?}") };
    assert!(
        matches!(first.result, Err(Error::NotFinite { step: 3, position: 5, .. })) && first.lane == bad,
        "{first:?}"
    );
    assert_eq!(second.result.as_ref().unwrap().tokens.len(), 8);
}

#[test]
fn a_failed_pass_ends_its_lanes_and_the_next_request_works() {
    for fail_at in 1..6 {
        let mut lanes = lanes(2);
        lanes.forward_mut().fail_at = Some(fail_at);
        lanes.admit(work(&[1, 2], 16, 0)).unwrap();
        lanes.admit(work(&[3], 16, 1)).unwrap();
        let finished = drain(&mut lanes);
        assert_eq!(finished.len(), 2);
        assert!(finished.iter().all(|f| matches!(f.result, Err(Error::Backend(_)))), "{finished:?}");
        assert_eq!((lanes.forward().filled(0), lanes.cached(0).len()), (0, 0));
        let after = lanes.generate(work(&[1, 2], 16, 0), &mut silent).unwrap();
        assert_eq!(after.tokens, alone(work(&[1, 2], 16, 0)).tokens);
    }
}

#[test]
fn cancel_from_outside_frees_the_lane_at_the_next_step() {
    let mut lanes = lanes(2);
    let (a, b) = (lanes.admit(work(&[1], 40, 0)).unwrap(), lanes.admit(work(&[2], 40, 1)).unwrap());
    lanes.step(&mut |_, _| Control::Continue);
    lanes.cancel(a);
    lanes.cancel(77);
    let finished = lanes.step(&mut |_, _| Control::Continue);
    assert_eq!(finished.iter().map(|f| f.lane).collect::<Vec<_>>(), [a]);
    assert_eq!(denoised(lanes.forward().log.as_deref().unwrap()).last().unwrap(), &[b]);
}

#[test]
fn a_cancelled_prefill_denoises_nothing() {
    let mut lanes = lanes(1);
    let done = lanes
        .generate(work(&(0..50).collect::<Vec<_>>(), 8, 0), &mut |event| match event {
            Event::Prefill { done: 32, total: 50 } => Control::Cancel,
            _ => Control::Continue,
        })
        .unwrap();
    assert_eq!((done.finish_reason, done.tokens.len(), done.converged), (FinishReason::Cancelled, 0, false));
    let passes = vec![Pass::Prefill(vec![(0, 16)]), Pass::Prefill(vec![(0, 16)])];
    assert_eq!(lanes.forward().log.as_ref().unwrap(), &passes);
    assert_eq!(lanes.cached(0).len(), 32, "what was read stays for the next request");
}

#[test]
fn a_long_prompt_does_not_hold_up_the_others() {
    let mut lanes = lanes(2);
    let mut endless = work(&[1], 40, 0);
    endless.eog = [].into();
    let running = lanes.admit(endless).unwrap();
    lanes.step(&mut |_, _| Control::Continue);
    let long = lanes.admit(work(&(0..56).collect::<Vec<_>>(), 8, 1)).unwrap();
    let before = lanes.forward().log.as_ref().unwrap().len();
    while lanes.cached(long).len() < 56 {
        lanes.step(&mut |_, _| Control::Continue);
    }
    let log = &lanes.forward().log.as_ref().unwrap()[before..];
    let mut prefills = 0;
    for pair in log.windows(2) {
        assert!(!matches!(pair, [Pass::Prefill(_), Pass::Prefill(_)]), "two prefill passes in a row: {log:?}");
    }
    for pass in log {
        if let Pass::Prefill(parts) = pass {
            prefills += 1;
            assert!(parts.iter().map(|part| part.1).sum::<usize>() <= 16, "{parts:?}");
            // A commit needs its 8 tokens of 16: it is never put off.
            assert!(parts.iter().all(|(lane, n)| *lane != running || *n == 8), "{parts:?}");
        }
    }
    assert!(prefills >= 4, "{log:?}");
}

#[test]
fn a_free_lane_is_refilled_at_once() {
    let mut lanes = lanes(1);
    let mut short = work(&[1], 8, 0);
    short.settings.max_steps = 1;
    let lane = lanes.admit(short).unwrap();
    let error = lanes.admit(work(&[2], 8, 1)).unwrap_err();
    assert!(error.to_string().contains("all 1 are busy"), "{error}");
    assert_eq!(lanes.step(&mut |_, _| Control::Continue).len(), 1);
    assert_eq!(lanes.admit(work(&[2], 8, 1)).unwrap(), lane);
    lanes.step(&mut |_, _| Control::Continue);
    let log = lanes.forward().log.as_deref().unwrap();
    assert_eq!(denoised(log).len(), 2, "one denoising step per call: {log:?}");
}

#[test]
fn the_next_turn_finds_its_prompt_in_the_cache() {
    let mut lanes = lanes(2);
    let mut first = work(&[1, 2, 3], 16, 0);
    first.eog = [].into();
    let done = lanes.generate(first, &mut silent).unwrap();
    assert_eq!(done.tokens.len(), 16);
    // The last canvas is not committed, the first is.
    let cached: Vec<u32> = [1, 2, 3].iter().chain(&done.tokens[..8]).copied().collect();
    assert_eq!(lanes.cached(0), cached);

    let next: Vec<u32> = [1, 2, 3].iter().chain(&done.tokens).chain(&[5, 6]).copied().collect();
    let want = alone(work(&next, 8, 3)).tokens;
    let turn = lanes.generate(work(&next, 8, 3), &mut silent).unwrap();
    assert_eq!((turn.cost.prompt_tokens, turn.cost.cached_tokens), (21, 11));
    assert_eq!(turn.tokens, want);
    assert_eq!(lanes.cached(1), &[] as &[u32], "the other lane was not touched");

    // A prompt that is cached whole needs no prefill.
    let passes = lanes.forward().log.as_ref().unwrap().len();
    let again = lanes.generate(work(&[1, 2, 3], 8, 0), &mut silent).unwrap();
    assert_eq!(again.cost.cached_tokens, 3);
    let log = &lanes.forward().log.as_ref().unwrap()[passes..];
    assert!(log.iter().all(|pass| matches!(pass, Pass::Denoise(_))), "{log:?}");
    assert_eq!(again.tokens, done.tokens[..8]);
}

#[test]
fn a_ring_that_forgot_is_read_again() {
    let mut lanes = lanes(1);
    lanes.forward_mut().ring = Some(4);
    let mut first = work(&[1, 2, 3], 16, 0);
    first.eog = [].into();
    lanes.generate(first, &mut silent).unwrap();
    let again = lanes.generate(work(&[1, 2, 3], 8, 0), &mut silent).unwrap();
    assert_eq!(again.cost.cached_tokens, 0);
    assert_eq!(again.tokens, alone(work(&[1, 2, 3], 8, 0)).tokens);
}

#[test]
fn forget_empties_free_lanes_only() {
    let mut lanes = lanes(2);
    lanes.generate(work(&[1, 2], 8, 0), &mut silent).unwrap();
    lanes.admit(work(&[1, 2], 40, 0)).unwrap();
    lanes.forget();
    assert_eq!((lanes.cached(0), lanes.cached(1)), (&[1, 2][..], &[][..]));
    drain(&mut lanes);
    lanes.forget();
    assert_eq!((lanes.cached(0).len(), lanes.forward().filled(0)), (0, 0));
}

#[test]
fn the_receipt_counts() {
    let mut counted = work(&(0..20).collect::<Vec<_>>(), 16, 0);
    counted.eog = [].into();
    let mut lanes = lanes(2);
    lanes.forward_mut().slow = std::time::Duration::from_millis(1);
    let lane = lanes.admit(counted).unwrap();
    lanes.admit(work(&[5], 8, 1)).unwrap();
    let done = drain(&mut lanes).into_iter().find(|f| f.lane == lane).unwrap().result.unwrap();
    let cost = &done.cost;
    assert_eq!((cost.prompt_tokens, cost.cached_tokens, cost.lanes), (20, 0, 2));
    assert_eq!(cost.steps_per_canvas.len(), 2);
    let passes = lanes.forward().log.as_ref().unwrap().len() as u64;
    assert_eq!((cost.graphs.graphs_built, cost.graphs.graphs_replayed), (1, passes - 1));
    // What slept at least a millisecond cannot have taken less.
    let ms = std::time::Duration::from_millis(1);
    assert!(cost.prefill >= ms && cost.step >= ms && cost.commit >= ms && cost.host > std::time::Duration::ZERO);
    assert!(cost.total >= cost.prefill + cost.commit + cost.step * cost.forwards() as u32 / 2);
}

#[derive(Debug, Clone)]
enum Act {
    Admit { prompt: usize, len: usize, max_tokens: usize },
    Cancel(usize),
    Steps(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0usize..3, 1usize..50, 1usize..30).prop_map(|(prompt, len, max_tokens)| Act::Admit {
            prompt,
            len,
            max_tokens
        }),
        (0usize..4).prop_map(Act::Cancel),
        (1usize..12).prop_map(Act::Steps),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any schedule keeps the protocol (a breach is an error), ends every request once, and gives what each gives alone.
    #[test]
    fn any_schedule(acts in prop::collection::vec(act(), 1..40), budget in 1usize..40, ring in prop::option::of(0usize..20)) {
        let mut network = Scripted::made_up(SHAPE);
        network.ring = ring;
        let mut lanes = Lanes::new(network, budget);
        let mut requests: HashMap<usize, (Vec<u32>, usize, u64, bool)> = HashMap::new();
        let mut admitted = 0;
        let mut finished = Vec::new();
        for act in acts.into_iter().chain([Act::Steps(10_000)]) {
            match act {
                Act::Admit { prompt, len, max_tokens } if lanes.free() > 0 => {
                    // Three families of prompts, so that prefixes are shared.
                    let prompt: Vec<u32> = (0..len as u32).map(|i| (i * 7 + prompt as u32) % 90).collect();
                    let lane = lanes.admit(work(&prompt, max_tokens, admitted)).unwrap();
                    prop_assert!(requests.insert(lane, (prompt, max_tokens, admitted, false)).is_none(), "lane {} was busy", lane);
                    admitted += 1;
                }
                Act::Admit { .. } => prop_assert!(lanes.admit(work(&[1], 1, 0)).is_err()),
                Act::Cancel(lane) => {
                    lanes.cancel(lane);
                    if let Some(request) = requests.get_mut(&lane) {
                        request.3 = true;
                    }
                }
                Act::Steps(n) => for _ in 0..n {
                    if lanes.running() == 0 {
                        break;
                    }
                    for done in lanes.step(&mut |_, _| Control::Continue) {
                        let request = requests.remove(&done.lane).expect("a request that ran");
                        finished.push((request, done.result));
                    }
                },
            }
            for lane in 0..SHAPE.lanes {
                prop_assert_eq!(lanes.forward().filled(lane), lanes.cached(lane).len());
            }
        }
        prop_assert!(requests.is_empty());
        prop_assert_eq!(finished.len() as u64, admitted);
        for ((prompt, max_tokens, candidate, cancelled), result) in finished {
            let (got, want) = (result.unwrap(), alone(work(&prompt, max_tokens, candidate)));
            prop_assert_eq!(got.finish_reason == FinishReason::Cancelled, cancelled);
            if cancelled {
                prop_assert!(want.tokens.starts_with(&got.tokens));
            } else {
                prop_assert_eq!(got.tokens, want.tokens);
                prop_assert_eq!(got.finish_reason, want.finish_reason);
            }
        }
    }
}
