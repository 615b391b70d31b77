//! `gc` while everything else goes on: nothing that is needed is deleted, and all else is.

mod model;
