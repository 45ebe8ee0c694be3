use crate::support::*;
use half::bf16;
use nvfp4_kernels::{
    attention::{self, Attention, AttentionGradients, AttentionParams, Heads, Rope, Sequences},
    tensor::FloatKind,
};

struct Rng(u64);
impl Rng {
    fn next(&mut self) -> f32 {
        let mut s = 0.0;
        for _ in 0..4 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            s += (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        }
        s * 1.7
    }
}

fn run(batch: usize, tq: usize, tk: usize, h: usize, hk: usize, d: usize, causal: bool, window: Option<usize>) {
    let client = cubecl::Device::Cuda(Default::default()).client();
    let mut rng = Rng(batch as u64 + 31 * tq as u64 + 77 * d as u64);
    let mut make = |t: usize, heads: usize| -> Vec<f32> {
        (0..batch * t * heads * d).map(|_| bf16::from_f32(rng.next()).to_f32()).collect()
    };
    let (q, k, v, dout) = (make(tq, h), make(tk, hk), make(tk, hk), make(tq, h));
    let up = |x: &[f32], t: usize, heads: usize| {
        let bits: Vec<u16> = x.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
        Heads::contiguous(client.create_from_slice(bytemuck::cast_slice(&bits)), [batch * t, heads, d], FloatKind::Bf16)
    };
    let params = AttentionParams { causal, window, ..AttentionParams::new(d) };
    let a = Attention { q: up(&q, tq, h), k: up(&k, tk, hk), v: up(&v, tk, hk), sequences: Sequences::Equal(batch), params };
    let out = attention::forward(&client, &a).unwrap();
    let e = |t: usize, heads: usize| Heads::empty(&client, [batch * t, heads, d], FloatKind::Bf16);
    let g = AttentionGradients { dq: e(tq, h), dk: e(tk, hk), dv: e(tk, hk) };
    attention::backward(&client, &a, &out, &up(&dout, tq, h), None::<&Rope>, &g).unwrap();
    let down = |heads: &Heads| -> Vec<f32> {
        let bytes = client.read_one(heads.handle.clone()).unwrap();
        bytemuck::cast_slice::<u8, u16>(&bytes)[..heads.tokens * heads.heads * d].iter().map(|b| bf16::from_bits(*b).to_f32()).collect()
    };
    let (o, dq, dk, dv) = (down(&out.out), down(&g.dq), down(&g.dk), down(&g.dv));
    let bytes = client.read_one(out.lse.clone()).unwrap();
    let lse: Vec<f32> = bytemuck::cast_slice::<u8, f32>(&bytes)[..h * batch * tq].to_vec();
    let scale = params.scale as f64;
    let mut ro = vec![0.0f64; o.len()];
    let (mut rdq, mut rdk, mut rdv) = (vec![0.0f64; dq.len()], vec![0.0f64; dk.len()], vec![0.0f64; dv.len()]);
    let mut worst_lse = 0.0f64;
    for b in 0..batch { for hh in 0..h { let kh = hh / (h / hk); for i in 0..tq {
        let qi = |x| q[((b * tq + i) * h + hh) * d + x] as f64;
        let shift = tk as i64 - tq as i64;
        let seen = |j: usize| (!causal || j as i64 <= i as i64 + shift) && window.is_none_or(|w| j as i64 > i as i64 + shift - w as i64);
        let s: Vec<f64> = (0..tk).map(|j| if seen(j) { (0..d).map(|x| qi(x) * k[((b * tk + j) * hk + kh) * d + x] as f64).sum::<f64>() * scale } else { f64::NEG_INFINITY }).collect();
        let m = s.iter().cloned().fold(f64::NEG_INFINITY, f64::max);
        let l: f64 = if m.is_finite() { s.iter().map(|s| (s - m).exp()).sum() } else { 0.0 };
        let rl = if l > 0.0 { m + l.ln() } else { f64::NEG_INFINITY };
        let fl = lse[hh * batch * tq + b * tq + i] as f64;
        if rl.is_finite() { worst_lse = worst_lse.max((fl - rl).abs()); } else { assert_eq!(fl, rl); }
        let p: Vec<f64> = s.iter().map(|s| if l > 0.0 { (s - m).exp() / l } else { 0.0 }).collect();
        let at = ((b * tq + i) * h + hh) * d;
        for j in 0..tk { if p[j] != 0.0 { for x in 0..d { ro[at + x] += p[j] * v[((b * tk + j) * hk + kh) * d + x] as f64; } } }
        let delta: f64 = (0..d).map(|x| dout[at + x] as f64 * ro[at + x]).sum();
        for j in 0..tk { if p[j] != 0.0 {
            let kat = ((b * tk + j) * hk + kh) * d;
            let dp: f64 = (0..d).map(|x| dout[at + x] as f64 * v[kat + x] as f64).sum();
            let ds = p[j] * (dp - delta) * scale;
            for x in 0..d { rdv[kat + x] += p[j] * dout[at + x] as f64; rdq[at + x] += ds * k[kat + x] as f64; rdk[kat + x] += ds * q[at + x] as f64; }
        } }
    } } }
    let err = |a: &[f32], r: &[f64]| { let (mut e, mut n, mut w) = (0.0, 0.0, 0.0f64); for (a, r) in a.iter().zip(r) { e += (*a as f64 - r).powi(2); n += r * r; w = w.max((*a as f64 - r).abs()); } ((e / n.max(1e-30)).sqrt(), w) };
    let all = [err(&o, &ro), err(&dq, &rdq), err(&dk, &rdk), err(&dv, &rdv)];
    println!("b{batch} tq{tq} tk{tk} h{h}/{hk} d{d} causal {causal} window {window:?}: lse {worst_lse:.1e} o {:.1e} dq {:.1e} dk {:.1e} dv {:.1e}", all[0].0, all[1].0, all[2].0, all[3].0);
    assert!(worst_lse < 1e-3 && all.iter().all(|e| e.0 < 1.2e-2), "{all:?}");
}

#[test]
fn smoke() {
    let mut bad = 0;
    for (b, tq, tk, h, hk, d, causal, w) in [
        (1, 1, 1, 1, 1, 64, false, None), (1, 64, 64, 1, 1, 64, false, None), (2, 128, 128, 2, 1, 64, true, None), (2, 300, 300, 4, 2, 64, true, None),
        (1, 113, 203, 2, 2, 64, true, None), (1, 203, 113, 2, 2, 64, true, None), (1, 500, 500, 2, 1, 64, true, Some(100)), (1, 128, 128, 1, 1, 128, false, None),
        (2, 300, 300, 4, 2, 128, true, None), (1, 513, 700, 2, 2, 128, false, None), (1, 200, 200, 2, 1, 96, true, None), (1, 200, 200, 2, 1, 32, true, None),
        (1, 200, 200, 2, 1, 80, true, None), (1, 200, 150, 2, 1, 192, true, None), (1, 200, 200, 2, 1, 256, true, None), (1, 200, 200, 2, 1, 256, true, Some(33)),
    ] {
        let r = std::panic::catch_unwind(|| run(b, tq, tk, h, hk, d, causal, w));
        if r.is_err() { bad += 1; println!("FAILED b{b} tq{tq} tk{tk} d{d} causal {causal}"); }
    }
    assert_eq!(bad, 0);
}
