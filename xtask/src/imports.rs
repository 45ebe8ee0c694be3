//! Detects forbidden imports between the files of a crate: cycles, and imports of a file that only
//! the feature `proof` compiles by one that ships.
//!
//! A file imports another if it names an item defined there, in a `use` or in a path, through any
//! re-exports. A re-export (`pub use`) is not an import, and neither is `mod`. Method calls and
//! code compiled only for tests are ignored.
//!
//! cargo-modules (0.27, `dependencies --acyclic`) is not used: it ignores the bodies of functions,
//! counts re-exports as imports and recursive types of one file as cycles, and ignores features.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree, Visibility};

use crate::workspace;

/// Checks all crates of the workspace.
pub fn run() -> Result<()> {
    let mut problems = 0;
    for member in workspace::members()? {
        for root in ["src/lib.rs", "src/main.rs"] {
            let root = member.folder.join(root);
            if root.exists() {
                let found = problems_of(&root)?;
                problems += found.len();
                found.iter().for_each(|problem| println!("{problem}"));
            }
        }
    }
    ensure!(
        problems == 0,
        "{problems} forbidden imports between files: move what two files of a circle share to a \
         third, and what a shipped file needs out of the modules of the feature `proof`"
    );
    println!("no circles of imports between files, and none of what only `proof` compiles");
    Ok(())
}

/// Returns the cycles of a crate, each with its files and the items that they import from each
/// other, and the imports of shipped files from files of the feature `proof`.
fn problems_of(root: &Path) -> Result<Vec<String>> {
    let source = root.parent().context("a file is in a folder")?;
    let mut tree = Tree::default();
    tree.read(root, source, Vec::new())?;
    let imports = tree.imports();
    let mut graph: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (from, to) in imports.keys() {
        graph.entry(*from).or_default().insert(*to);
    }
    let root = workspace::root();
    let name = |file: usize| {
        let path = &tree.files[file];
        path.strip_prefix(&root).unwrap_or(path).display()
    };
    let mut all: Vec<String> = (imports.iter())
        .filter(|((from, to), _)| tree.proof.contains(to) && !tree.proof.contains(from))
        .map(|((from, to), names)| {
            let names: Vec<&str> = names.iter().map(|name| &**name).collect();
            let (from, to) = (name(*from), name(*to));
            format!(
                "only the feature `proof` compiles {to}, and {from} imports {}",
                names.join(", ")
            )
        })
        .collect();
    for circle in connected(&graph, tree.files.len()) {
        let mut text = format!("a circle of {} files:", circle.len());
        for ((from, to), names) in &imports {
            if circle.contains(from) && circle.contains(to) {
                let names: Vec<&str> = names.iter().map(|name| &**name).collect();
                let (from, to) = (name(*from), name(*to));
                text += &format!("\n  {from} -> {to}: {}", names.join(", "));
            }
        }
        all.push(text);
    }
    Ok(all)
}

/// Returns the strongly connected components with more than one node.
fn connected(graph: &BTreeMap<usize, BTreeSet<usize>>, nodes: usize) -> Vec<BTreeSet<usize>> {
    let reach: Vec<BTreeSet<usize>> = (0..nodes)
        .map(|node| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![node]);
            while let Some(node) = open.pop() {
                for next in graph.get(&node).into_iter().flatten() {
                    if seen.insert(*next) {
                        open.push(*next);
                    }
                }
            }
            seen
        })
        .collect();
    let mut all = BTreeSet::new();
    for node in 0..nodes {
        let both = |other: &usize| reach[*other].contains(&node);
        let circle: BTreeSet<usize> = reach[node].iter().copied().filter(both).collect();
        if circle.len() > 1 {
            all.insert(circle);
        }
    }
    all.into_iter().collect()
}

/// A name that a module imports.
struct Import {
    /// Path as written, relative to the module.
    path: Vec<String>,
    /// True if the import is re-exported.
    is_offered: bool,
}

/// A module with its definitions and imports.
#[derive(Default)]
struct Module {
    file: usize,
    children: BTreeSet<String>,
    items: BTreeSet<String>,
    imports: BTreeMap<String, Import>,
    globs: Vec<Vec<String>>,
    /// Paths used in code.
    paths: BTreeSet<Vec<String>>,
}

/// Modules of a crate, by path.
#[derive(Default)]
struct Tree {
    files: Vec<PathBuf>,
    /// Files that only the feature `proof` compiles.
    proof: BTreeSet<usize>,
    modules: BTreeMap<Vec<String>, Module>,
}

/// Returns true for code compiled only for tests.
fn is_test(attributes: &[Attribute]) -> bool {
    has_condition(attributes, "test")
}

/// Returns true if a `cfg` of the attributes contains the word `condition`.
fn has_condition(attributes: &[Attribute], condition: &str) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && matches!(&attribute.meta, syn::Meta::List(list)
                if list.tokens.to_string().split(|c: char| !c.is_alphanumeric())
                    .any(|word| word == condition))
    })
}

impl Tree {
    /// Reads the module `path`, whose file is `file` and whose children are in `folder`.
    fn read(&mut self, file: &Path, folder: &Path, path: Vec<String>) -> Result<()> {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let parsed = syn::parse_file(&text).with_context(|| file.display().to_string())?;
        self.files.push(file.to_owned());
        self.fill(self.files.len() - 1, &parsed.items, folder, path)
    }

    fn fill(
        &mut self,
        file: usize,
        items: &[Item],
        folder: &Path,
        path: Vec<String>,
    ) -> Result<()> {
        let mut module = Module {
            file,
            ..Module::default()
        };
        for item in items {
            if let Item::Mod(child) = item {
                self.child(file, child, folder, &path, &mut module)?;
            } else {
                module.visit_item(item);
            }
        }
        self.modules.insert(path, module);
        Ok(())
    }

    fn child(
        &mut self,
        file: usize,
        child: &ItemMod,
        folder: &Path,
        path: &[String],
        module: &mut Module,
    ) -> Result<()> {
        if is_test(&child.attrs) {
            return Ok(());
        }
        let name = child.ident.to_string();
        let mut path = path.to_vec();
        path.push(name.clone());
        let folder = folder.join(&name);
        module.children.insert(name.clone());
        if let Some((_, items)) = &child.content {
            return self.fill(file, items, &folder, path);
        }
        let (alone, inside) = (folder.with_extension("rs"), folder.join("mod.rs"));
        let first = self.files.len();
        match (alone.exists(), inside.exists()) {
            (true, _) => self.read(&alone, &folder, path)?,
            (false, true) => self.read(&inside, &folder, path)?,
            _ => bail!("no file of module {name}: {}", alone.display()),
        }
        if has_condition(&child.attrs, "proof") {
            self.proof.extend(first..self.files.len());
        }
        Ok(())
    }

    /// Returns the names that each file imports from each other file.
    fn imports(&self) -> BTreeMap<(usize, usize), BTreeSet<String>> {
        let mut all: BTreeMap<(usize, usize), BTreeSet<String>> = BTreeMap::new();
        for (at, module) in &self.modules {
            let own = module.imports.values().filter(|import| !import.is_offered);
            let own = own.map(|import| &import.path);
            for path in own.chain(&module.paths) {
                let Some((file, name)) = self.find(at, path, 0) else {
                    continue;
                };
                if file != module.file {
                    all.entry((module.file, file)).or_default().insert(name);
                }
            }
        }
        all
    }

    /// Returns the file that defines `path` as seen from the module `at`, and the item's name
    /// there; none for modules and for items of other crates.
    fn find(&self, at: &[String], path: &[String], depth: usize) -> Option<(usize, String)> {
        // Mutual re-exports, which the compiler refuses unless they are globs.
        if depth > 16 {
            return None;
        }
        let mut at = at.to_vec();
        let mut rest = path;
        let mut is_first = true;
        while let [first, others @ ..] = rest {
            let module = self.modules.get(&at)?;
            match first.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => at.truncate(at.len().checked_sub(1)?),
                // A function may share the name of a module; a module is followed by another path
                // segment.
                name if module.children.contains(name)
                    && !(others.is_empty() && module.items.contains(name)) =>
                {
                    at.push(name.to_owned());
                }
                name if module.items.contains(name) => return Some((module.file, name.to_owned())),
                name => {
                    if let Some(import) = module.imports.get(name) {
                        // `use rayon;`, or a name of this crate that shadows no module.
                        if import.path.len() == 1 && import.path[0] == name {
                            return None;
                        }
                        let path: Vec<String> = import.path.iter().chain(others).cloned().collect();
                        return self.find(&at, &path, depth + 1);
                    }
                    let glob = module.globs.iter().find_map(|glob| {
                        let path: Vec<String> = glob.iter().chain(rest).cloned().collect();
                        self.find(&at, &path, depth + 1)
                    });
                    // Items generated by a derive or a macro are not visible here, but are named in
                    // full elsewhere.
                    return match is_first || depth > 0 && glob.is_some() {
                        true => glob,
                        false => glob.or_else(|| Some((module.file, name.to_owned()))),
                    };
                }
            }
            is_first = false;
            rest = others;
        }
        None
    }
}

impl Module {
    fn add_use(&mut self, tree: &UseTree, mut prefix: Vec<String>, is_offered: bool) {
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.add_use(&path.tree, prefix, is_offered);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_use(tree, prefix.clone(), is_offered);
                }
            }
            UseTree::Glob(_) => self.globs.push(prefix),
            UseTree::Name(name) if name.ident == "self" => {
                let last = prefix.last().cloned().unwrap_or_default();
                self.import(last, prefix, is_offered);
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                prefix.push(name.clone());
                self.import(name, prefix, is_offered);
            }
            UseTree::Rename(rename) => {
                prefix.push(rename.ident.to_string());
                let mut name = rename.rename.to_string();
                if name == "_" {
                    name = prefix.join("::");
                }
                self.import(name, prefix, is_offered);
            }
        }
    }

    fn import(&mut self, name: String, path: Vec<String>, is_offered: bool) {
        self.imports.insert(name, Import { path, is_offered });
    }

    /// Collects the paths in the tokens of a macro.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.paths.extend((!path.is_empty()).then(|| path.clone()));
                        path.clear();
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.paths.extend((!path.is_empty()).then(|| path.clone()));
                    path.clear();
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.add_tokens(group.stream());
                    }
                }
            }
        }
        self.paths.extend((!path.is_empty()).then_some(path));
    }
}

impl<'a> Visit<'a> for Module {
    fn visit_item(&mut self, item: &'a Item) {
        let (attributes, name) = match item {
            Item::Const(item) => (&item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.attrs, Some(&item.ident)),
            Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
            Item::Impl(item) => (&item.attrs, None),
            Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
            Item::Static(item) => (&item.attrs, Some(&item.ident)),
            Item::Struct(item) => (&item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.attrs, Some(&item.ident)),
            Item::Type(item) => (&item.attrs, Some(&item.ident)),
            Item::Union(item) => (&item.attrs, Some(&item.ident)),
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            self.items.extend(name.map(ToString::to_string));
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        if !is_test(&item.attrs) {
            let is_offered = !matches!(item.vis, Visibility::Inherited);
            self.add_use(&item.tree, Vec::new(), is_offered);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if path.leading_colon.is_none() {
            let names = path.segments.iter().map(|part| part.ident.to_string());
            self.paths.insert(names.collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'a syn::Macro) {
        self.add_tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    /// Attributes name derive helpers and documentation, not imports.
    fn visit_attribute(&mut self, _attribute: &'a Attribute) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the problems of a crate with these files.
    fn problems(name: &str, files: &[(&str, &str)]) -> Vec<String> {
        let folder = workspace::target_folder()
            .unwrap()
            .join("imports")
            .join(name);
        let _ = fs::remove_dir_all(&folder);
        for (file, text) in files {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        problems_of(&folder.join("lib.rs")).unwrap()
    }

    #[test]
    fn a_circle_is_found_behind_re_exports() {
        let found = problems(
            "circle",
            &[
                ("lib.rs", "mod a;\nmod b;\npub use b::inner::Thing;"),
                (
                    "a.rs",
                    "use crate::Thing;\npub fn make() -> Thing { Thing }",
                ),
                ("b/mod.rs", "pub mod inner;"),
                (
                    "b/inner.rs",
                    "pub struct Thing;\nfn again() { drop(vec![super::super::a::make()]) }",
                ),
            ],
        );
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("a.rs -> ") && found[0].contains(": Thing"),
            "{found:?}"
        );
        assert!(
            found[0].contains("inner.rs -> ") && found[0].contains(": make"),
            "{found:?}"
        );
    }

    #[test]
    fn parents_tests_and_re_exports_are_no_circle() {
        let found = problems(
            "none",
            &[
                (
                    "lib.rs",
                    "mod a;\nmod b;\npub use a::first;\npub struct Root;",
                ),
                (
                    "a.rs",
                    "use crate::Root;\nuse crate::b::second;\npub fn first(_: Root) { second() }",
                ),
                (
                    "b.rs",
                    "pub fn second() {}\n#[cfg(test)]\nmod tests { use crate::a::first; }",
                ),
            ],
        );
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn shipped_files_import_nothing_of_proof() {
        let instances = "use crate::registry::Instance;\nuse super::kernel;\n\
                         pub fn all() -> Instance { kernel(); Instance }";
        let files = |kernel| {
            [
                (
                    "lib.rs",
                    "mod a;\n#[cfg(feature = \"proof\")]\npub mod registry;",
                ),
                ("a.rs", kernel),
                ("a/instances.rs", instances),
                ("registry.rs", "mod inner;\npub use inner::Instance;"),
                ("registry/inner.rs", "pub struct Instance;"),
            ]
        };
        let gate = "#[cfg(feature = \"proof\")]\nmod instances;\npub fn kernel() {}";
        assert_eq!(problems("shipped", &files(gate)), Vec::<String>::new());
        let wrong = format!("use crate::registry::Instance;\n{gate}");
        let found = problems("unshipped", &files(&wrong));
        assert_eq!(found.len(), 1, "{found:?}");
        let names = ["registry/inner.rs", "a.rs imports Instance"];
        assert!(
            names.iter().all(|name| found[0].contains(name)),
            "{found:?}"
        );
    }
}
