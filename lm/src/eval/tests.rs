use super::*;

#[test]
fn windows_count_every_token_once() {
    let over =
        |tokens, length, stride| -> Vec<_> { Windows { length, stride }.over(tokens).collect() };
    assert_eq!(
        over(10, 4, 2),
        [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]
    );
    assert_eq!(over(5, 4, 3), [(0, 4, 1), (3, 5, 4)]);
    assert_eq!(over(4, 4, 1), [(0, 4, 1)]);
    assert_eq!(over(2, 100, 50), [(0, 2, 1)]);
    for tokens in 2..40 {
        for length in 2..9 {
            for stride in 1..length {
                let mut counted = Vec::new();
                for (begin, end, first) in over(tokens, length, stride) {
                    assert!(begin < first && first < end && end <= begin + length);
                    counted.extend(first..end);
                }
                assert!(counted.into_iter().eq(1..tokens));
            }
        }
    }
}

#[test]
fn the_mean_is_of_tokens_and_its_error_of_windows() {
    let found = CrossEntropy::of(&[(2, 2.0), (2, 6.0), (4, 8.0)]);
    assert_eq!((found.tokens, found.mean), (8, 2.0));
    // The sums of the windows deviate by -2, 2 and 0 nats: sqrt(8 · 3 / 2) / 8.
    assert!((found.error - 12f64.sqrt() / 8.0).abs() < 1e-15);
    assert!((found.perplexity() - 2f64.exp()).abs() < 1e-12);
    assert!((found.perplexity_error() - 2f64.exp() * found.error).abs() < 1e-12);
    assert_eq!(CrossEntropy::of(&[(3, 1.0)]).error, f64::INFINITY);
    let half = Accuracy::of(50, 100);
    assert_eq!((half.share, half.error), (0.5, (0.25f64 / 99.0).sqrt()));
    assert_eq!(first_best(&[-2.0, -1.0, -1.0]), 1);
}

#[test]
fn questions_are_lines() {
    let folder = nvfp4_test_support::Scratch::new("questions");
    let path = folder.join("questions.jsonl");
    let good = r#"{"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}"#;
    fs::write(&path, format!("{good}\n\n{good}\n")).unwrap();
    assert_eq!(Question::read(&path).unwrap().len(), 2);
    for (line, expected) in [
        (
            r#"{"context": "a", "choices": ["b"], "answer": 0}"#,
            "at least two",
        ),
        (
            r#"{"context": "a", "choices": ["b", "c"], "answer": 2}"#,
            "answer is 2",
        ),
        (
            r#"{"context": "a", "choices": ["b", ""], "answer": 0}"#,
            "empty",
        ),
        (
            r#"{"context": "a", "choices": ["b", "c"], "label": 0}"#,
            "label",
        ),
        ("[", "EOF"),
    ] {
        fs::write(&path, format!("{good}\n{line}\n")).unwrap();
        let error = format!("{:#}", Question::read(&path).unwrap_err());
        assert!(
            error.contains(expected) && error.contains("line 2"),
            "{error}"
        );
    }
    fs::write(&path, "\n").unwrap();
    assert!(Question::read(&path).is_err());
}

#[cfg(feature = "flex")]
mod with_a_model {
    use burn::tensor::{Device, FloatDType};

    use super::*;
    use crate::hf::{GenerationConfig, TensorFolder};
    use nvfp4_test_support::golden;

    /// Returns the rows of a reference, and their negative log-likelihoods from transformers.
    fn reference(folder: &Path, name: &str) -> Vec<(Vec<u32>, Vec<f32>)> {
        let tensors = TensorFolder::open_file(&folder.join("reference.safetensors")).unwrap();
        let ids = tensors.get("input_ids").unwrap().bytes();
        let (ids, _) = ids.as_chunks();
        let ids: Vec<u32> = ids
            .iter()
            .map(|id| i64::from_le_bytes(*id) as u32)
            .collect();
        let nll = tensors.get(name).unwrap().to_f32().unwrap();
        let rows = ids.chunks(32).zip(nll.chunks(31));
        rows.map(|(ids, nll)| (ids.to_vec(), nll.to_vec()))
            .collect()
    }

    #[track_caller]
    fn assert_reference(model: &Decoder, rows: &[(Vec<u32>, Vec<f32>)]) {
        for (ids, expected) in rows {
            let found = log_probabilities(model, ids).unwrap();
            for (found, expected) in found.iter().zip(expected) {
                let error = (found + expected).abs();
                assert!(error < 1e-5, "{found}, not -{expected}");
            }
        }
        let texts: Vec<Vec<u32>> = rows.iter().map(|(ids, _)| ids.clone()).collect();
        let windows = Windows {
            length: 32,
            stride: 16,
        };
        let mut told = Vec::new();
        let found = cross_entropy(model, &texts, windows, &mut |done, of| {
            told.push((done, of))
        });
        let found = found.unwrap();
        let all: Vec<f64> = rows
            .iter()
            .flat_map(|row| &row.1)
            .map(|n| f64::from(*n))
            .collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert_eq!((found.tokens, told), (62, vec![(31, 62), (62, 62)]));
        assert!((found.mean - mean).abs() < 1e-5);
    }

    #[test]
    fn losses_are_those_of_transformers() {
        let folder = golden("llama3-tiny");
        let model = Decoder::load(&folder, &Device::flex(), FloatDType::F32).unwrap();
        let rows = reference(&folder, "nll_f64");
        assert_reference(&model, &rows);

        // A window without the preceding context gives other values.
        let short = Windows {
            length: 8,
            stride: 7,
        };
        let texts = [rows[0].0.clone()];
        let found = cross_entropy(&model, &texts, short, &mut |_, _| ()).unwrap();
        let second = log_probabilities(&model, &texts[0][7..15]).unwrap();
        let first = log_probabilities(&model, &texts[0][..8]).unwrap();
        assert_eq!(found.tokens, 31);
        let begin: f64 = first.iter().chain(&second).map(|n| -f64::from(*n)).sum();
        let rest = cross_entropy(&model, &[texts[0][14..].to_vec()], short, &mut |_, _| ());
        let rest = rest.unwrap();
        let whole = begin + rest.mean * rest.tokens as f64;
        assert!((found.mean * 31.0 - whole).abs() < 1e-9);

        let fails = |texts: &[Vec<u32>], length, stride| {
            let windows = Windows { length, stride };
            let error = cross_entropy(&model, texts, windows, &mut |_, _| ());
            error.unwrap_err().to_string()
        };
        assert!(fails(&texts, 1, 1).contains("length is 1"));
        assert!(fails(&texts, 8, 8).contains("stride is 8"));
        assert!(fails(&texts, 8, 0).contains("stride is 0"));
        assert!(fails(&[], 8, 4).contains("texts"));
        assert!(fails(&[vec![1]], 8, 4).contains("text 0"));
    }

    #[test]
    fn losses_of_packed_weights_are_those_of_transformers() {
        let folder = golden("llama3-tiny-ct-nvfp4a16");
        let load =
            |folder: &Path| Decoder::load_dequantized(folder, &Device::flex(), FloatDType::F32);
        assert_reference(&load(&folder).unwrap(), &reference(&folder, "nll_w4a16"));

        let error = load(&golden("llama3-tiny-ct-nvfp4")).unwrap_err();
        assert!(format!("{error:#}").contains("activations"), "{error:#}");
        let error = load(&golden("llama3-tiny")).unwrap_err();
        assert!(format!("{error:#}").contains("not quantized"), "{error:#}");
    }

    /// The model's maximum context is 256.
    #[test]
    fn texts_beyond_the_positions_of_the_model_are_refused_or_counted() {
        let folder = golden("llama3-tiny");
        let model = Decoder::load(&folder, &Device::flex(), FloatDType::F32).unwrap();
        let text: Vec<u32> = (0..300).map(|i| (i * 37 + 5) % 280).collect();
        let windows = |length| Windows {
            length,
            stride: length - 1,
        };
        let read = |length| {
            cross_entropy(
                &model,
                std::slice::from_ref(&text),
                windows(length),
                &mut |_, _| (),
            )
        };
        assert_eq!(read(256).unwrap().tokens, 299);
        let error = read(257).unwrap_err().to_string();
        assert!(
            error.contains("is 257") && error.contains("256 positions"),
            "{error}"
        );
        let generated = |most| {
            let prompt = text[..250].to_vec();
            let generation = crate::decoder::Generation::greedy(most);
            model.generate(&[prompt], &generation, |_, _| Ok(true))
        };
        assert_eq!(generated(6).unwrap()[0].len(), 6);
        let error = generated(7).unwrap_err().to_string();
        assert!(
            error.contains("is 257") && error.contains("256 positions"),
            "{error}"
        );

        let tokenizer = Tokenizer::read(&folder, model.config().vocab, &[]).unwrap();
        let question = |context: &str| Question {
            context: context.into(),
            choices: vec![" a".into(), " b".into()],
            answer: 0,
        };
        let questions = [question("short"), question(&"the fox ".repeat(200))];
        let found = choose(&model, &tokenizer, &questions, &mut |_, _| ()).unwrap();
        assert_eq!(found.beyond, 1);
    }

    #[test]
    fn choices_are_compared_after_the_context() {
        let folder = golden("llama3-tiny");
        let model = Decoder::load(&folder, &Device::flex(), FloatDType::F32).unwrap();
        let settings = GenerationConfig::read(&folder, model.config()).unwrap();
        let tokenizer = Tokenizer::read(&folder, model.config().vocab, &settings.eos).unwrap();
        let question = |answer| Question {
            context: "The quick brown".into(),
            choices: vec![" fox".into(), " dog jumps over".into()],
            answer,
        };
        // The model is random, so its own choices define the right answers.
        let scores: Vec<f64> = question(0)
            .choices
            .iter()
            .map(|choice| {
                let before = tokenizer.encode("The quick brown", true).unwrap();
                let own = tokenizer.encode(choice, false).unwrap();
                let whole = [&before[..], &own].concat();
                let found = log_probabilities(&model, &whole).unwrap();
                let own = &found[before.len() - 1..];
                own.iter().map(|nats| f64::from(*nats)).sum()
            })
            .collect();
        let best = first_best(&scores);
        let questions = [question(best), question(best), question(1 - best)];
        let found = choose(&model, &tokenizer, &questions, &mut |_, _| ()).unwrap();
        assert!((found.plain.share - 2.0 / 3.0).abs() < 1e-12);
        let by_byte = usize::from(scores[1] / 15.0 > scores[0] / 4.0);
        let right = questions.iter().filter(|q| q.answer == by_byte).count();
        assert!((found.normalized.share - right as f64 / 3.0).abs() < 1e-12);
        assert!(choose(&model, &tokenizer, &[], &mut |_, _| ()).is_err());
    }
}
