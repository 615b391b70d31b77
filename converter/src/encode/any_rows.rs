//! Rows of all kinds, for the tests of the encoders.

use proptest::prelude::*;

/// A row of up to 70 elements: of one kind, constant, or a mixture with something special in it.
pub(super) fn row() -> impl Strategy<Value = Vec<f32>> {
    let bits = any::<u32>().prop_map(f32::from_bits);
    let zero = prop_oneof![Just(0.0f32), Just(-0.0)];
    let special = prop_oneof![
        Just(f32::NAN),
        Just(f32::INFINITY),
        Just(f32::NEG_INFINITY),
        Just(f32::MAX),
        Just(f32::MIN)
    ];
    let kinds = prop_oneof![
        4 => (-1.0f32..1.0).boxed(),
        2 => bits.boxed(),
        1 => (0..64u32).prop_map(f32::from_bits).boxed(),
        1 => (-1e-9f32..1e-9).boxed(),
        1 => (1000.0f32..1000.001).boxed(),
        1 => prop_oneof![zero.clone(), 0.0f32..1.0].boxed(),
        1 => prop_oneof![zero.clone(), -1.0f32..0.0].boxed(),
        1 => zero.boxed(),
        1 => (0..=510u16).prop_map(|half| f32::from(half) / 2.0).boxed(),
    ];
    let cell = prop_oneof![12 => kinds.clone(), 1 => special.boxed()];
    let width = 1..=70usize;
    prop_oneof![
        (width.clone(), kinds.clone()).prop_map(|(width, value)| vec![value; width]),
        width.clone().prop_flat_map(move |width| proptest::collection::vec(cell.clone(), width)),
        width.prop_flat_map(|width| proptest::collection::vec(-3.0f32..3.0, width)),
    ]
}

/// A block of rows of one width; all plain most often, so that groups of them are.
pub(super) fn block() -> impl Strategy<Value = (usize, Vec<f32>)> {
    let special = row().prop_map(|row| row.first().copied().unwrap_or(0.0)).boxed();
    let odd = prop_oneof![
        Just(f32::NAN),
        Just(f32::NEG_INFINITY),
        Just(1e30f32),
        Just(1e-30),
        Just(-0.0),
        Just(0.0)
    ];
    let width = prop_oneof![12 => 1..=140usize, 1 => 500..=530usize, 1 => 1000..=2100usize];
    (width, 1..=20usize, -45..=40i32, 0..6u32).prop_flat_map(move |(width, rows, exponent, kind)| {
        let value = (-1.0f32..1.0).prop_map(move |value| value * 2f32.powi(exponent)).boxed();
        let value = match kind {
            0 => prop_oneof![200 => value, 1 => odd.clone()].boxed(),
            1 => prop_oneof![1 => value, 1 => special.clone()].boxed(),
            2 => prop_oneof![Just(0.0f32), Just(-0.0)].boxed(),
            3 => prop_oneof![value.prop_map(f32::abs), Just(-0.0f32)].boxed(),
            _ => value,
        };
        (Just(width), proptest::collection::vec(value, width * rows))
    })
}
