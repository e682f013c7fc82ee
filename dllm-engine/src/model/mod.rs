//! Networks: the seam to the denoising loop, and the building blocks that families share.

mod breakdown;
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
mod placement;
mod plan;
mod repack;
mod sampling;
mod weights;
mod workspace;

pub use breakdown::PartTime;
pub use forward::{Counters, DenoiseLane, Forward, Position, PrefillLane, Shape};
pub use network::Network;
pub use plan::{DevicePlan, MemoryPlan};

pub(crate) use cache::CacheLayer;
#[cfg(feature = "cli")]
pub(crate) use config::device_kind;
pub(crate) use device_pass::DevicePass;
pub(crate) use layers::{Attention, Decoded, Experts, Pass};
pub(crate) use repack::HEAD;
pub(crate) use weights::{Role, TensorSpec};
