//! Serving hosts: the fetch API, followers, readers, and what happens to them when something breaks.
