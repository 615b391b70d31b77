//! Tests of the embedded queue.
