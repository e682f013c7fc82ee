//! Networks: the seam to the denoising loop, and the building blocks that families share.

mod cache;
mod compile;
mod config;
mod forward;
mod inputs;
#[cfg(feature = "cli")]
mod inspect;
mod layers;
mod network;
mod plan;
mod weights;

pub use forward::{Counters, DenoiseLane, Forward, Position, PrefillLane, Shape};
pub use network::Network;
pub use plan::MemoryPlan;

pub(crate) use cache::CacheLayer;
pub(crate) use layers::{Attention, Decoded, Experts, Pass};
pub(crate) use weights::TensorSpec;
