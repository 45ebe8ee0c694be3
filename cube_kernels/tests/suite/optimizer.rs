//! AdamW and the norm of gradients compared with the oracle bit for bit; on CubeCL's CPU runtime or
//! on a GPU (`NVFP4_TEST_DEVICE`).

use crate::support::device::{DeviceElement, read_bytes, upload_bytes};
use crate::support::inputs::{Kind, convert, values};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::reference::{self, AdamWParams, AdamWSchedule, Moment};
use nvfp4_kernels::{
    graph,
    optimizer::{self, AdamWSpec, AdamWUpdate, Gradient},
    tensor::FloatKind,
};

const PARAMS: AdamWParams = AdamWParams {
    beta_1: 0.9,
    beta_2: 0.95,
    epsilon: 1e-8,
};

/// Whole vectors and tails, one chunk of the norm and several, no elements, one element.
const LENGTHS: [usize; 9] = [4096, 1, 3, 0, 20_000, 16_384, 16_388, 33_001, 8];

/// Returns the bits, with the same bits for every NaN.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|x| if x.is_nan() { f32::NAN } else { *x }.to_bits())
        .collect()
}

fn read<T: bytemuck::Pod>(client: &Client, handle: &Handle, len: usize) -> Vec<T> {
    bytemuck::pod_collect_to_vec(&read_bytes(client, handle, len * size_of::<T>()))
}

fn raise(x: &[impl Moment]) -> Vec<u32> {
    bits(&x.iter().map(|x| x.to_f32()).collect::<Vec<_>>())
}

/// One parameter on host and device.
struct Parameter<M> {
    weight: Vec<f32>,
    first: Vec<M>,
    second: Vec<M>,
    decay: f32,
    key: [u32; 2],
    device: [Handle; 3],
    copy: Option<Handle>,
}

impl<M: Moment + bytemuck::Pod> Parameter<M> {
    fn new(client: &Client, len: usize, index: usize, copy: Option<FloatKind>) -> Self {
        let weight = values(Kind::Normal, len, index as u32);
        let zeros = vec![M::round(0.0, 0); len];
        Self {
            device: [
                upload_bytes(client, bytemuck::cast_slice(&weight)),
                upload_bytes(client, bytemuck::cast_slice(&zeros)),
                upload_bytes(client, bytemuck::cast_slice(&zeros)),
            ],
            copy: copy.map(|kind| client.empty((len * kind.size()).max(1))),
            first: zeros.clone(),
            second: zeros,
            weight,
            decay: if index.is_multiple_of(2) { 0.1 } else { 0.0 },
            key: [index as u32, 77],
        }
    }
}

/// Three steps of parameters of all lengths: all state equals the oracle's after each step.
fn check<G: DeviceElement, M: Moment + bytemuck::Pod, C: DeviceElement + bytemuck::Pod>(
    client: &Client,
    moments: FloatKind,
    clip: Option<f32>,
    kind: Kind,
) {
    let copy = (C::KIND != FloatKind::F32).then_some(C::KIND);
    let mut parameters: Vec<Parameter<M>> = (0..)
        .zip(LENGTHS)
        .map(|(index, len)| Parameter::new(client, len, index, copy))
        .collect();
    for step in 1..=3 {
        let gradients: Vec<Vec<G>> = (0..)
            .zip(LENGTHS)
            .map(|(index, len)| convert(&values(kind, len, 100 * step as u32 + index)))
            .collect();
        let schedule = AdamWSchedule::new(&PARAMS, 1e-2, step);
        let on_device: Vec<Gradient> = gradients
            .iter()
            .map(|gradient| Gradient {
                handle: upload_bytes(client, bytemuck::cast_slice(gradient)),
                elements: gradient.len(),
                dtype: G::KIND,
            })
            .collect();
        let expected_sums: Vec<f32> = gradients
            .iter()
            .flat_map(|gradient| reference::square_sums(gradient))
            .collect();
        let (sums, count) = optimizer::square_sums(client, &on_device).unwrap();
        assert_eq!(count, expected_sums.len());
        assert_eq!(bits(&read(client, &sums, count)), bits(&expected_sums));
        let made = optimizer::clip_factor(client, &sums, count, clip.unwrap_or(1.0)).unwrap();
        let (norm, factor) = reference::clip_factor(&expected_sums, clip.unwrap_or(1.0));
        assert_eq!(bits(&read(client, &made, 2)), bits(&[norm, factor]));

        let updates: Vec<AdamWUpdate> = parameters
            .iter()
            .zip(&on_device)
            .map(|(parameter, gradient)| AdamWUpdate {
                gradient: gradient.clone(),
                weight: parameter.device[0].clone(),
                first: parameter.device[1].clone(),
                second: parameter.device[2].clone(),
                copy: parameter.copy.clone().map(|handle| (handle, C::KIND)),
                decay: parameter.decay,
                key: parameter.key,
            })
            .collect();
        let amax = upload_bytes(client, bytemuck::cast_slice(&[0.0f32; LENGTHS.len()]));
        let words = upload_bytes(client, bytemuck::cast_slice(&schedule.words()));
        let spec = AdamWSpec {
            params: PARAMS,
            moments,
            schedule: &words,
            factor: clip.map(|_| &made),
        };
        optimizer::adamw(client, &spec, &updates, Some(&amax)).unwrap();

        let factor = if clip.is_some() { factor } else { 1.0 };
        let found_amax: Vec<f32> = read(client, &amax, LENGTHS.len());
        for (index, (parameter, gradient)) in parameters.iter_mut().zip(&gradients).enumerate() {
            let update = reference::AdamWUpdate {
                gradient,
                weight: &mut parameter.weight,
                first: &mut parameter.first,
                second: &mut parameter.second,
                decay: parameter.decay,
                key: parameter.key,
            };
            reference::adamw(&PARAMS, &schedule, factor, update);
            let len = gradient.len();
            let [weight, first, second] = &parameter.device;
            let at = format!("parameter {index}, step {step}");
            let found: Vec<f32> = read(client, weight, len);
            assert_eq!(bits(&found), bits(&parameter.weight), "weight of {at}");
            let found: Vec<M> = read(client, first, len);
            assert_eq!(raise(&found), raise(&parameter.first), "first of {at}");
            let found: Vec<M> = read(client, second, len);
            assert_eq!(raise(&found), raise(&parameter.second), "second of {at}");
            let stored: Vec<f32> = parameter
                .weight
                .iter()
                .map(|weight| C::from_f32(*weight).to_f32())
                .collect();
            if let Some(copy) = &parameter.copy {
                let found: Vec<C> = read(client, copy, len);
                let found: Vec<f32> = found.iter().map(|value| value.to_f32()).collect();
                assert_eq!(bits(&found), bits(&stored), "copy of {at}");
            }
            let largest = stored.iter().fold(0.0f32, |largest, value| {
                if largest.is_nan() || value.is_nan() {
                    f32::NAN
                } else {
                    largest.max(value.abs())
                }
            });
            assert_eq!(bits(&[found_amax[index]]), bits(&[largest]), "amax of {at}");
        }
    }
}

#[test]
fn f32_is_the_oracles() {
    let client = client!("f32_is_the_oracles");
    check::<f32, f32, f32>(&client, FloatKind::F32, Some(1.0), Kind::Normal);
    check::<f32, f32, f32>(&client, FloatKind::F32, None, Kind::Tiny);
}

#[test]
fn gradients_that_are_not_finite_propagate() {
    let client = client!("gradients_that_are_not_finite_propagate");
    for kind in [Kind::Nan, Kind::Infinity, Kind::Huge] {
        check::<f32, f32, f32>(&client, FloatKind::F32, Some(1.0), kind);
    }
}

#[test]
fn bf16_parameters_and_moments_are_the_oracles() {
    let client = client!("bf16_parameters_and_moments_are_the_oracles");
    check::<bf16, bf16, bf16>(&client, FloatKind::Bf16, Some(1.0), Kind::Heavy);
    check::<bf16, f32, bf16>(&client, FloatKind::F32, Some(1e9), Kind::Normal);
}

#[test]
fn f16_parameters_are_the_oracles() {
    let client = client!("f16_parameters_are_the_oracles");
    check::<f16, f32, f16>(&client, FloatKind::F32, Some(1.0), Kind::Normal);
}

/// A buffer contains the words of the last step that was set, at an unchanged address.
#[test]
fn words_are_written_in_place() {
    let client = client!("words_are_written_in_place");
    let out = upload_bytes(&client, &[0; 16]);
    for step in [1, u64::from(u32::MAX) + 3] {
        let words = AdamWSchedule::new(&PARAMS, 0.3, step).words();
        graph::set_words(&client, &out, words).unwrap();
        assert_eq!(read::<u32>(&client, &out, 4), words);
    }
    let short = client.empty(12);
    let error = graph::set_words(&client, &short, [0; 4]).unwrap_err();
    assert!(error.to_string().contains("`out`"), "{error}");
}

#[test]
fn short_buffers_are_refused() {
    let client = client!("short_buffers_are_refused");
    let handle = client.empty(64);
    let gradient = |elements| Gradient {
        handle: handle.clone(),
        elements,
        dtype: FloatKind::F32,
    };
    assert!(optimizer::square_sums(&client, &[gradient(16)]).is_ok());
    let error = optimizer::square_sums(&client, &[gradient(17)]).unwrap_err();
    assert!(error.to_string().contains("`gradient`"), "{error}");
    let update = |copy| AdamWUpdate {
        gradient: gradient(16),
        weight: handle.clone(),
        first: handle.clone(),
        second: client.empty(60),
        copy,
        decay: 0.0,
        key: [0; 2],
    };
    let spec = |moments| AdamWSpec {
        params: PARAMS,
        moments,
        schedule: &handle,
        factor: None,
    };
    let refused = |moments, copy| {
        optimizer::adamw(&client, &spec(moments), &[update(copy)], None)
            .unwrap_err()
            .to_string()
    };
    assert!(refused(FloatKind::F16, None).contains("`moments`"));
    assert!(refused(FloatKind::F32, None).contains("`second`"));
    let copy = Some((handle.clone(), FloatKind::F32));
    assert!(refused(FloatKind::Bf16, copy).contains("`copy`"));
}
