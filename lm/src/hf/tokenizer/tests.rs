use std::fs;

use serde_json::{Value, json};

use super::*;
use nvfp4_test_support::{Scratch, golden};

#[test]
fn a_panic_of_the_library_is_an_error() {
    let folder = Scratch::new("tokenizer-panic");
    let json = json!({
        "version": "1.0", "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    });
    for decoder in [json!({"type": "None"}), json!(1)] {
        let mut json = json.clone();
        json["decoder"] = decoder;
        fs::write(folder.join(TOKENIZER_FILE), json.to_string()).unwrap();
        let error = Tokenizer::read(&folder, 1, &[]).err().unwrap().to_string();
        assert!(error.contains(TOKENIZER_FILE), "{error}");
    }
    assert!(
        guarded::<()>(|| panic!("why"))
            .unwrap_err()
            .contains("panics: why")
    );
}

fn matches_golden(folder: &Path) {
    let tokenizer = Tokenizer::read(folder, 288, &[285, 287]).unwrap();
    let cases = fs::read(folder.join("tokenizer_golden.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        for (field, special) in [("ids", true), ("ids_no_special", false)] {
            let ids = tokenizer.encode(text, special).unwrap();
            assert_eq!(json!(ids), case[field], "{field} of {text:?}");
        }
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), case["decoded"]);
    }
}

#[test]
fn llama_tokens_are_those_of_the_python_library() {
    matches_golden(&golden("llama3-tiny"));
}

#[test]
fn qwen_tokens_are_those_of_the_python_library() {
    matches_golden(&golden("qwen3-tiny"));
}

/// Returns a tokenizer with the words `a` to `d` and the special tokens `<s>` and `</s>`; the
/// first begins a text.
fn small() -> Value {
    json!({
        "version": "1.0",
        "added_tokens": [{"id": 4, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
        },
        "model": {"type": "WordLevel", "unk_token": "a",
            "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "<s>": 4, "</s>": 5}},
    })
}

fn read_with(json: &Value, config: &Value) -> Result<Tokenizer> {
    let folder = Scratch::new(&format!(
        "tokenizer-obeys-{:?}",
        std::thread::current().id()
    ));
    fs::write(folder.join(TOKENIZER_FILE), json.to_string()).unwrap();
    let config_file = folder.join("tokenizer_config.json");
    fs::write(config_file, config.to_string()).unwrap();
    Tokenizer::read(&folder, 6, &[])
}

/// Settings that a training script left in the file for its batches.
#[test]
fn truncation_and_padding_are_off() {
    let mut json = small();
    json["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
        "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Left",
        "pad_to_multiple_of": 8, "pad_id": 3, "pad_type_id": 0, "pad_token": "d"});
    let tokenizer = read_with(&json, &json!({"model_max_length": 2})).unwrap();
    let expected = [4, 0, 1, 2, 3];
    assert_eq!(tokenizer.encode("a b c d", true).unwrap(), expected);
    assert_eq!(tokenizer.encode_text("a b c d").unwrap(), expected);
    let (tokens, bytes) = tokenizer.encode_text_with_bytes("a b c d").unwrap();
    assert_eq!((tokens.len(), bytes.len()), (5, 5));
    assert_eq!(bytes[..3], [0..0, 0..1, 2..3]);
}

/// Chat templates write the start-of-text token themselves.
#[test]
fn texts_have_one_beginning_and_one_end() {
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"},
        "add_eos_token": true});
    let tokenizer = read_with(&small(), &config).unwrap();
    for (text, expected) in [
        ("a b", &[4, 0, 1, 5][..]),
        ("<s>a b", &[4, 0, 1, 5]),
        ("<s> a b </s>", &[4, 0, 1, 5]),
        ("", &[4, 5]),
        ("<s>", &[4, 5]),
    ] {
        assert_eq!(tokenizer.encode_text(text).unwrap(), expected, "{text}");
    }
    assert_eq!(tokenizer.encode("<s>a", true).unwrap(), [4, 4, 0, 5]);
    assert_eq!(tokenizer.encode("<s>a", false).unwrap(), [4, 0]);
}

#[test]
fn tokenizer_config_is_obeyed() {
    let plain = read_with(&small(), &json!({})).unwrap();
    let with = |config: Value| read_with(&small(), &config).unwrap();
    // Neutral values, and settings for batches.
    for config in [
        json!({"add_bos_token": null, "bos_token": null, "added_tokens_decoder": {},
            "extra_special_tokens": {}, "split_special_tokens": false}),
        json!({"bos_token": "<s>", "add_bos_token": true, "add_eos_token": false,
            "padding_side": "left", "truncation_side": "left", "pad_token": "[PAD]"}),
    ] {
        let same = with(config);
        assert_eq!(same.hash(), plain.hash());
        assert_eq!(same.encode_text("a").unwrap(), [4, 0]);
    }
    for (config, text, expected) in [
        (
            json!({"bos_token": "<s>", "add_bos_token": false}),
            "a",
            &[0][..],
        ),
        // As special tokens, words are matched anywhere.
        (
            json!({"additional_special_tokens": ["b"]}),
            "abc",
            &[4, 0, 1, 2],
        ),
        (json!({"split_special_tokens": true}), "<s>a", &[4, 0]),
        (
            json!({"added_tokens_decoder": {"1": {"content": "b", "special": false}}}),
            "cbd",
            &[4, 2, 1, 3],
        ),
    ] {
        let tokenizer = with(config.clone());
        assert_eq!(tokenizer.encode(text, true).unwrap(), expected, "{config}");
        assert_ne!(tokenizer.hash(), plain.hash(), "{config}");
    }
}

#[test]
fn what_changes_tokens_and_is_not_obeyed_is_refused_by_name() {
    let refused = |json: &Value, config: Value, says: &str| {
        let error = read_with(json, &config).err();
        let error = error.unwrap_or_else(|| panic!("{config} was accepted: {says}"));
        assert!(error.to_string().contains(says), "{error}");
    };
    let mut json = small();
    json["added_tokens"][0]["id"] = json!(5);
    refused(&json, json!({}), "`added_tokens` says");
    let mut json = small();
    json["sampling"] = json!(null);
    read_with(&json, &json!({})).unwrap();
    json["sampling"] = json!(0.1);
    refused(&json, json!({}), "`sampling`");
    let bpe = |dropout: Value| {
        json!({"model": {"type": "BPE", "dropout": dropout, "vocab": {"a": 0, "b": 1},
            "merges": []}})
    };
    read_with(&bpe(json!(null)), &json!({})).unwrap();
    refused(&bpe(json!(0.1)), json!({}), "`model.dropout` is 0.1");
    let plain = small();
    for (config, says) in [
        (json!({"add_eos_token": true}), "`add_eos_token`"),
        (json!({"add_bos_token": 1}), "`add_bos_token` is 1"),
        (json!({"additional_special_tokens": ["<new>"]}), "`<new>`"),
        (
            json!({"added_tokens_decoder": {"9": {"content": "b"}}}),
            "`added_tokens_decoder`",
        ),
        (
            json!({"added_tokens_decoder": {"6": {"content": "<more>"}}}),
            "token `<more>` has id 6",
        ),
    ] {
        refused(&plain, config, says);
    }
}

/// Returns an error's text.
fn refusal(json: &Value, config: &Value) -> String {
    let error = read_with(json, config).err();
    error.map_or(String::new(), |error| error.to_string())
}

#[test]
fn unknown_fields_of_every_model_are_refused_by_name() {
    let words = json!({"a": 0, "b": 1});
    for (kind, model) in [
        ("BPE", json!({"vocab": words, "merges": []})),
        (
            "WordPiece",
            json!({"vocab": words, "unk_token": "a", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 8}),
        ),
        ("WordLevel", json!({"vocab": words, "unk_token": "a"})),
        (
            "Unigram",
            json!({"vocab": [["a", 0.0], ["b", -1.0]], "unk_id": 0, "byte_fallback": false}),
        ),
    ] {
        // The library also finds the type by the fields.
        for kind in [Some(kind), None] {
            let mut json = json!({"model": model});
            if let Some(kind) = kind {
                json["model"]["type"] = json!(kind);
            }
            let config = json!({});
            json["model"]["sampling"] = json!(null);
            read_with(&json, &config).unwrap();
            json["model"]["sampling"] = json!(0.1);
            let said = refusal(&json, &config);
            assert!(said.contains("`model.sampling`"), "{kind:?}: {said}");
        }
    }
}

/// Returns [`small`] with a normalizer and a pre-tokenizer.
fn with_rules(normalizer: Value, pre_tokenizer: Value) -> Value {
    let mut json = small();
    json["normalizer"] = normalizer;
    json["pre_tokenizer"] = json!({"type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, pre_tokenizer]});
    json
}

/// A rule of `tokenizer_config.json` must be that of `tokenizer.json`.
#[test]
fn contradicting_rules_are_refused_by_name() {
    let split = |pattern: &str| {
        json!({"type": "Split", "pattern": {"Regex": pattern},
        "behavior": "Isolated", "invert": false})
    };
    let mistral = split(concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ));
    let bytes = |space: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": space,
        "trim_offsets": true, "use_regex": true})
    };
    let meta = |scheme: &str| {
        json!({"type": "Metaspace", "replacement": "\u{2581}",
        "prepend_scheme": scheme, "split": false})
    };
    let bert = |strips: Value| {
        json!({"type": "BertNormalizer", "clean_text": true,
        "handle_chinese_chars": false, "strip_accents": strips, "lowercase": true})
    };
    let plain = || split("x");
    let json = |normalizer: &Value, splitter: Value| with_rules(normalizer.clone(), splitter);
    let none = Value::Null;
    let lower = json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}]});
    let accents = json!({"type": "StripAccents"});
    let spaces = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "});
    let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
    for (field, yes, no) in [
        (
            "add_prefix_space",
            json(&none, bytes(true)),
            json(&none, bytes(false)),
        ),
        (
            "add_prefix_space",
            json(&none, meta("first")),
            json(&none, meta("never")),
        ),
        (
            "add_prefix_space",
            json(&prepend, plain()),
            json(&none, plain()),
        ),
        ("do_lower_case", json(&lower, plain()), json(&none, plain())),
        (
            "strip_accents",
            json(&accents, plain()),
            json(&lower, plain()),
        ),
        (
            "strip_accents",
            json(&bert(json!(null)), plain()),
            json(&bert(json!(false)), plain()),
        ),
    ] {
        for (json, value) in [(&yes, true), (&no, false)] {
            read_with(json, &json!({field: value})).unwrap();
            read_with(json, &json!({field: null})).unwrap();
            let said = refusal(json, &json!({field: !value}));
            assert!(said.contains(&format!("`{field}`")), "{value}: {said}");
        }
    }
    // False is the default, which other tokenizers than those of the field also have.
    for (field, yes, no) in [
        (
            "keep_accents",
            json(&lower, plain()),
            json(&accents, plain()),
        ),
        ("remove_space", json(&spaces, plain()), json(&none, plain())),
        (
            "fix_mistral_regex",
            json(&none, mistral),
            json(&none, plain()),
        ),
    ] {
        for json in [&yes, &no] {
            read_with(json, &json!({field: false})).unwrap();
        }
        read_with(&yes, &json!({field: true})).unwrap();
        let said = refusal(&no, &json!({field: true}));
        assert!(said.contains(&format!("`{field}`")), "{said}");
    }
    let chinese = json!({"tokenize_chinese_chars": true});
    read_with(&json(&none, plain()), &chinese).unwrap();
    let said = refusal(&json(&bert(json!(null)), plain()), &chinese);
    assert!(said.contains("`tokenize_chinese_chars`"), "{said}");
}

/// transformers removes spaces before punctuation in texts of all models but BPE.
#[test]
fn cleaning_of_decoded_texts_is_refused_where_transformers_cleans() {
    let bpe = json!({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}});
    let clean = json!({"clean_up_tokenization_spaces": true});
    read_with(&bpe, &clean).unwrap();
    read_with(&small(), &json!({"clean_up_tokenization_spaces": false})).unwrap();
    let forced = json!({"clean_up_tokenization_spaces": true,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": true});
    for (json, config) in [(&small(), &clean), (&bpe, &forced)] {
        let said = refusal(json, config);
        assert!(said.contains("`clean_up_tokenization_spaces`"), "{said}");
    }
}

#[test]
fn settings_without_a_form_in_the_tokenizer_are_refused_unless_neutral() {
    for (field, neutral, set) in [
        ("sp_model_kwargs", json!({}), json!({"alpha": 0.1})),
        ("src_lang", json!(null), json!("eng_Latn")),
        ("do_lowercase", json!(false), json!(true)),
    ] {
        read_with(&small(), &json!({field: neutral})).unwrap();
        let said = refusal(&small(), &json!({field: set}));
        assert!(said.contains(&format!("`{field}`")), "{said}");
    }
}

/// Files as their makers published them, without tokens and templates.
#[test]
fn settings_of_known_models_are_accepted() {
    let bytes = json!({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false}});
    let mut pieces = bytes.clone();
    pieces["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u{2581}"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]});
    pieces["pre_tokenizer"] = json!(null);
    let batches = json!({"model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"], "padding_side": "left"});
    for (maker, json, config) in [
        (
            "Llama 3",
            &bytes,
            json!({"clean_up_tokenization_spaces": true}),
        ),
        (
            "Qwen",
            &bytes,
            json!({"add_bos_token": false, "add_prefix_space": false, "bos_token": null,
                "additional_special_tokens": [], "clean_up_tokenization_spaces": false,
                "errors": "replace", "split_special_tokens": false, "unk_token": null}),
        ),
        (
            "gpt-oss",
            &bytes,
            json!({"clean_up_tokenization_spaces": false, "extra_special_tokens": {}}),
        ),
        (
            "DeepSeek",
            &bytes,
            json!({"add_eos_token": false, "clean_up_tokenization_spaces": false, "legacy": true,
                "sp_model_kwargs": {}, "unk_token": null}),
        ),
        (
            "Gemma 3",
            &bytes,
            json!({"clean_up_tokenization_spaces": false, "extra_special_tokens": {},
                "image_token": "<image_soft_token>", "processor_class": "Gemma3Processor",
                "sp_model_kwargs": null, "spaces_between_special_tokens": false,
                "use_default_system_prompt": false}),
        ),
        (
            "Mistral",
            &pieces,
            json!({"add_prefix_space": true, "clean_up_tokenization_spaces": false,
                "from_slow": true, "legacy": false, "sp_model_kwargs": {},
                "spaces_between_special_tokens": false, "use_default_system_prompt": false}),
        ),
        (
            "transformers 5",
            &bytes,
            json!({"backend": "tokenizers", "is_local": true, "local_files_only": false,
                "model_specific_special_tokens": {}, "response_template": null}),
        ),
    ] {
        let mut all = batches.clone();
        all.as_object_mut()
            .unwrap()
            .extend(config.as_object().unwrap().clone());
        let said = refusal(json, &all);
        assert_eq!(said, "", "{maker}");
    }
}

#[test]
fn tokenizers_that_do_not_fit_are_errors() {
    let folder = Scratch::new("tokenizer");
    let error = |text: &str, needed: &[u32]| {
        fs::write(folder.join(TOKENIZER_FILE), text).unwrap();
        let Err(error) = Tokenizer::read(&folder, 3, needed) else {
            panic!("{text} was accepted");
        };
        let error = format!("{error:#}");
        assert!(error.contains(TOKENIZER_FILE), "{error}");
        error
    };
    let words = |vocab: &str| {
        format!(r#"{{"model":{{"type":"WordLevel","vocab":{vocab},"unk_token":"a"}}}}"#)
    };
    assert!(error("{", &[]).contains("tokenizer.json"));
    let found = error(&words(r#"{"a":0,"b":3}"#), &[]);
    assert!(
        found.contains("token `b` has id 3") && found.contains("3 ids"),
        "{found}"
    );
    let found = error(&words(r#"{"a":0,"b":0}"#), &[]);
    assert!(
        found.contains("has id 0, which another token has"),
        "{found}"
    );
    let found = error(&words(r#"{"a":0,"b":2}"#), &[0, 1]);
    assert!(found.contains("no token of id 1"), "{found}");
    assert!(error(&words("{}"), &[]).contains("no tokens"));
    fs::remove_file(folder.join(TOKENIZER_FILE)).unwrap();
    let Err(found) = Tokenizer::read(&folder, 3, &[]) else {
        panic!("there is no file");
    };
    assert!(found.to_string().contains(TOKENIZER_FILE), "{found}");
}

/// Texts with a special token that the model lacks are refused, but not the tokenizer.
#[test]
fn special_tokens_beyond_the_vocabulary_are_refused_in_texts() {
    let mut json = small();
    let image = json!({"id": 6, "content": "<image>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    json["added_tokens"].as_array_mut().unwrap().push(image);
    let tokenizer = read_with(&json, &json!({})).unwrap();
    assert_eq!(tokenizer.encode("b c", false).unwrap(), [1, 2]);
    let errors = [
        tokenizer.encode("b <image>", false).map(drop),
        tokenizer.encode_text("<image> b").map(drop),
    ];
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`<image>` of id 6"), "{error}");
    }
    json["added_tokens"][1]["special"] = json!(false);
    let error = format!("{:#}", read_with(&json, &json!({})).err().unwrap());
    assert!(error.contains("token `<image>` has id 6"), "{error}");
}
