//! Networks: the seam to the denoising loop, and the building blocks that families share.

mod cache;
mod compile;
mod config;
mod device_pass;
mod forward;
mod inputs;
#[cfg(feature = "cli")]
mod inspect;
mod layers;
mod network;
mod plan;
mod repack;
mod sampling;
mod weights;

pub use forward::{Counters, DenoiseLane, Forward, Position, PrefillLane, Shape};
pub use network::Network;
pub use plan::MemoryPlan;

pub(crate) use cache::CacheLayer;
#[cfg(feature = "cli")]
pub(crate) use config::device_kind;
pub(crate) use device_pass::DevicePass;
pub(crate) use layers::{Attention, Decoded, Experts, Pass};
pub(crate) use repack::HEAD;
pub(crate) use weights::{Role, TensorSpec};
