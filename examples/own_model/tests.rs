use super::*;

#[test]
fn a_resumed_run_has_the_losses_of_an_uninterrupted_one() {
    let folder = env::temp_dir().join(format!("nvfp4-own-model-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    let text = include_bytes!("main.rs");
    let train =
        |name: &str, steps| train(&Device::flex(), text, steps, &folder.join(name)).unwrap();
    let whole = train("whole", 3);
    assert_eq!(whole.len(), 3);
    // A model that predicts all bytes alike has a loss of ln 256 = 5.55.
    assert!(
        whole.iter().all(|loss| (1.0..6.5).contains(loss)),
        "{whole:?}"
    );
    let first = train("resumed", 2);
    let second = train("resumed", 3);
    assert_eq!([first, second].concat(), whole);
    let [whole, resumed] = ["whole", "resumed"].map(|name| folder.join(name));
    for file in ["model.bpk", "second.bpk"] {
        let values = |folder: &Path| {
            let model = Model::new(FloatDType::F32, &Device::flex()).unwrap();
            let model = model.try_load_file(folder.join(file)).unwrap();
            let mut values = Values::default();
            model.visit(&mut values);
            let values = values.0.into_values();
            let bytes = values.map(|value| value.into_data().as_bytes().to_vec());
            bytes.collect::<Vec<_>>()
        };
        // Ids of parameters differ from run to run, and with them the order.
        let [whole, resumed] = [&whole, &resumed].map(|folder| values(folder.as_path()));
        let found = |value| resumed.contains(value);
        assert!(
            whole.len() == resumed.len() && whole.iter().all(found),
            "{file}"
        );
    }
    fs::remove_dir_all(folder).unwrap();
}
