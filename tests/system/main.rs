//! The whole house, attacked: the built binary, run on real checkpoints, killed for real.
//!
//! The checkpoints lie in `tests/data/`. With the variable `WEIGHBRIDGE_FIXTURES` set to a folder of the same form,
//! the table-driven tests run over everything in there too.

mod binary;
mod commands;
mod crash;
mod damage;
mod fixtures;
mod gates;
mod golden;
mod hostile;
mod outside;
mod races;
