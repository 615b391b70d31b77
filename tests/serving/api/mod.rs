//! The API, attacked: by those who may not, by too many, by the slow, by the mute, by what stands between, and by bytes
//! that mean nothing.

mod access;
mod bounds;
mod certified;
mod crowd;
mod damaged;
mod fronted;
mod garbage;
mod herd;
mod hidden;
mod looked_up;
mod manifests;
mod served;
mod silence;
mod slow;
