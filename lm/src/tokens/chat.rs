//! Renders conversations with the chat template of a tokenizer's folder.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, context};
use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::checkpoint::read_json;
use crate::hf::TokenizerConfig;

/// File with the special tokens and, in older folders, the template.
const CONFIG: &str = "tokenizer_config.json";
/// File with the template.
const TEMPLATE: &str = "chat_template.jinja";
/// Roles of messages that every template may get.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Name of the template in the environment.
const NAME: &str = "chat_template";
/// Name of the filter that marks text of the assistant.
const MARKS: &str = "assistant_generation";
/// Start mark of the filter: a Unicode noncharacter, which does not occur in text.
const BEGIN: char = '\u{FDD0}';
/// End mark of the filter.
const END: char = '\u{FDD1}';

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Role of the author; `assistant` is the model.
    pub role: String,
    /// Text.
    pub content: String,
}

impl Message {
    /// Creates a message.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// A rendered conversation, with the byte ranges of the assistant's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// The whole text.
    pub text: String,
    /// Byte ranges of the answers in order, each from the end of its prompt to the end of its turn.
    pub answers: Vec<Range<usize>>,
}

/// A chat template: a Jinja template rendered like in transformers.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Reads the template of the tokenizer in `folder`, if it has one: `chat_template.jinja`, or
    /// `chat_template` in `tokenizer_config.json` (the one called `default` if there are several).
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or the template is malformed.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(CONFIG);
        let config: Map<String, Value> = match path.exists() {
            true => read_json(&path)?,
            false => Map::new(),
        };
        let own = folder.join(TEMPLATE);
        let source = match own.exists() {
            true => Some(fs::read_to_string(&own).with_context(|| own.display().to_string())?),
            false => in_config(&config).with_context(|| path.display().to_string())?,
        };
        let Some(source) = source else {
            return Ok(None);
        };
        let tokens = TokenizerConfig::read(folder)?;
        let text = |token: Option<&str>| token.unwrap_or_default().to_owned();
        let template = Self::new(source, text(tokens.bos()), text(tokens.eos()));
        template
            .with_context(|| folder.display().to_string())
            .map(Some)
    }

    /// Compiles the template `source`, with the start-of-text and end-of-text tokens. The tags
    /// `generation` and `endgeneration`, transformers' extension of Jinja, enclose the assistant's
    /// text.
    ///
    /// # Errors
    /// Returns an error if it is malformed.
    pub fn new(source: String, bos: String, eos: String) -> Result<Self> {
        let mut environment = Environment::new();
        // Same settings as transformers.
        let whitespace = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        environment.set_syntax(whitespace);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| {
            Err::<String, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| -> Result<String, _> {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default();
            strftime(&format, now.as_secs())
                .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, error))
        });
        environment.add_filter(MARKS, |text: String| format!("{BEGIN}{text}{END}"));
        // Converts the tags to standard Jinja blocks with the same white-space control.
        let tags = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")?;
        let source = tags.replace_all(&source, |tag: &Captures<'_>| match tag.get(2) {
            None => format!("{{%{} filter {MARKS} {}%}}", &tag[1], &tag[3]),
            Some(_) => format!("{{%{} endfilter {}%}}", &tag[1], &tag[3]),
        });
        environment
            .add_template_owned(NAME, source.into_owned())
            .map_err(|error| anyhow!("the chat template is malformed: {error:#}"))?;
        Ok(Self {
            environment,
            bos,
            eos,
        })
    }

    /// Renders `messages`; with `prompt`, appends the prompt for the assistant's next answer.
    ///
    /// # Errors
    /// Returns an error if the template refuses them.
    pub fn render(&self, messages: &[Message], prompt: bool) -> Result<String> {
        Ok(unmarked(&self.rendered(messages, prompt)?).0)
    }

    /// Renders `messages` with marks around the text that the template attributes to the assistant.
    fn rendered(&self, messages: &[Message], prompt: bool) -> Result<String> {
        let marked = messages.iter().position(|message| {
            let texts = [&message.role, &message.content];
            texts.iter().any(|text| text.contains([BEGIN, END]))
        });
        if let Some(index) = marked {
            bail!("message {index} has U+FDD0 or U+FDD1, which are no characters");
        }
        let template = self.environment.get_template(NAME)?;
        check_roles(messages, template.source())?;
        let rendered = template.render(context! {
            messages => Serde(messages),
            add_generation_prompt => prompt,
            tools => (),
            documents => (),
            bos_token => &self.bos,
            eos_token => &self.eos,
        });
        rendered.map_err(|error| anyhow!("the chat template refuses the messages: {error:#}"))
    }

    /// Renders `messages` and finds the assistant's text.
    ///
    /// # Errors
    /// Returns an error if there is no message of the assistant, or if the template refuses the
    /// messages. Without `generation` tags, also returns an error if the template changes the text
    /// before a message when that message is added, because the position of the answer is then
    /// undefined.
    pub fn conversation(&self, messages: &[Message]) -> Result<Conversation> {
        let (text, mut answers) = unmarked(&self.rendered(messages, false)?);
        if !answers.is_empty() {
            return Ok(Conversation { text, answers });
        }
        for (index, message) in messages.iter().enumerate() {
            if message.role != "assistant" {
                continue;
            }
            let before = self.render(&messages[..index], true)?;
            let with = self.render(&messages[..=index], false)?;
            ensure!(
                with.starts_with(&before) && text.starts_with(&with),
                "the chat template changes what comes before message {index} when it comes, or \
                 after it: give this conversation as one of its answers at a time"
            );
            answers.push(before.len()..with.len());
        }
        ensure!(
            !answers.is_empty(),
            "messages have none of the role `assistant`, but only its text counts in the loss"
        );
        Ok(Conversation { text, answers })
    }
}

/// Checks that `messages` have known roles, or roles that the template `source` names as texts. Most
/// templates render any other role, too, which no model has learned.
fn check_roles(messages: &[Message], source: &str) -> Result<()> {
    let names = |role: &str| {
        ['\'', '"']
            .iter()
            .any(|q| source.contains(&format!("{q}{role}{q}")))
    };
    for (index, Message { role, .. }) in messages.iter().enumerate() {
        ensure!(
            ROLES.contains(&&**role) || (!role.is_empty() && names(role)),
            "`messages[{index}]`: `role` is {role:?}, but must be {}, or a role that the chat \
             template names",
            ROLES.join(", ")
        );
    }
    Ok(())
}

/// Formats the time `seconds` after the beginning of 1970 in UTC. Supports the `strftime` codes
/// that dates in templates use.
///
/// # Errors
/// Returns an error if the format has an unknown code.
pub fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years start in March, in eras of 400 (Howard Hinnant, chrono-compatible date algorithms).
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = (from_march + 2) % 12 + 1;
    let year = year + era * 400 + u64::from(month <= 2);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut code = chars.next();
        let is_bare = code == Some('-');
        if is_bare {
            code = chars.next();
        }
        let number = |value: u64| match is_bare {
            true => value.to_string(),
            false => format!("{value:02}"),
        };
        text += &match code {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100),
            Some('m') => number(month),
            Some('d') => number(day),
            Some('H') => number(hour),
            Some('I') => number((hour + 11) % 12 + 1),
            Some('M') => number(minute),
            Some('S') => number(second % 60),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('B') => month_name.into(),
            Some('b') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('Z') => "UTC".into(),
            Some('%') => "%".into(),
            code => return Err(format!("strftime_now does not know {code:?} of {format:?}")),
        };
    }
    Ok(text)
}

/// Removes the marks, and returns the text with the byte ranges that were marked.
fn unmarked(marked: &str) -> (String, Vec<Range<usize>>) {
    let (mut text, mut ranges) = (String::new(), Vec::new());
    let mut begin = 0;
    for part in marked.split_inclusive([BEGIN, END]) {
        text.push_str(part.trim_end_matches([BEGIN, END]));
        if part.ends_with(BEGIN) {
            begin = text.len();
        } else if part.ends_with(END) && begin < text.len() {
            ranges.push(begin..text.len());
        }
    }
    (text, ranges)
}

/// Returns `chat_template` of a tokenizer's configuration.
fn in_config(config: &Map<String, Value>) -> Result<Option<String>> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(all)) => {
            let default = all.iter().find(|one| one["name"] == "default");
            let source = default.and_then(|one| one["template"].as_str());
            let source = source.context("`chat_template` has none called `default`")?;
            Ok(Some(source.to_owned()))
        }
        Some(other) => bail!("`chat_template` is {other}, but must be a text or a list of them"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A template like Qwen's, which calls a method of Python's strings.
    pub(crate) const CHATML: &str = "{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message['content'].strip() + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source.into(), "<s>".into(), "</s>".into()).unwrap()
    }

    #[test]
    fn answers_are_what_the_assistant_says() {
        let messages = [
            Message::new("system", "Be brief."),
            Message::new("user", " One? "),
            Message::new("assistant", "1"),
            Message::new("user", "Two?"),
            Message::new("assistant", "2"),
        ];
        let found = template(CHATML).conversation(&messages).unwrap();
        let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n\
                        <|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n\
                        <|im_start|>assistant\n2<|im_end|>\n";
        assert_eq!(found.text, expected);
        let answers: Vec<&str> = found
            .answers
            .iter()
            .map(|range| &found.text[range.clone()])
            .collect();
        assert_eq!(answers, ["1<|im_end|>\n", "2<|im_end|>\n"]);
    }

    /// transformers' tags select the text that counts, and do not change the rendered text, with
    /// every white-space control.
    #[test]
    fn generation_tags_say_what_counts() {
        let messages = [
            Message::new("user", "One?"),
            Message::new("assistant", " 1 "),
            Message::new("user", "Two?"),
            Message::new("assistant", "2"),
        ];
        let source = |begin: &str, end: &str| {
            format!(
                "{{% for m in messages %}}{{% if m.role == 'assistant' %}}[A]\n  {begin}\n {{{{ \
                 m.content }}}}<e>  {end}\n{{% else %}}[U]\n{{{{ m.content }}}}\n{{% endif \
                 %}}{{% endfor %}}{{% if add_generation_prompt %}}[A]\n{{% endif %}}"
            )
        };
        for (begin, end) in [
            ("{% generation %}", "{% endgeneration %}"),
            ("{%- generation -%}", "{%- endgeneration -%}"),
            ("{%generation-%}", "{% endgeneration+%}"),
        ] {
            let found = template(&source(begin, end))
                .conversation(&messages)
                .unwrap();
            // The same white-space control with standard Jinja tags.
            let same = |tag: &str, with: &str| tag.replace("generation", with);
            let plain = source(
                &same(begin, "if true"),
                &end.replace("endgeneration", "endif"),
            );
            let plain = template(&plain).render(&messages, false).unwrap();
            assert_eq!(found.text, plain, "{begin}");
            let answers = found.answers.iter().map(|range| &found.text[range.clone()]);
            let answers: Vec<&str> = answers.map(str::trim).collect();
            assert_eq!(answers, ["1 <e>", "2<e>"], "{begin}");
            assert!(!found.text.contains([BEGIN, END]));
        }
        let rendered = template(&source("{% generation %}", "{% endgeneration %}"));
        let text = rendered.render(&messages, true).unwrap();
        assert!(text.ends_with("[A]\n") && !text.contains(BEGIN), "{text}");
        let error = rendered.render(&[Message::new("user", "\u{FDD1}")], false);
        assert!(error.unwrap_err().to_string().contains("U+FDD1"));
    }

    /// Functions and variables that transformers provides to every template.
    #[test]
    fn templates_have_what_transformers_gives_them() {
        let user = [Message::new("user", "a")];
        let source = "{% if tools is not none or documents is not none %}tools{% endif %}{{ \
                      strftime_now('%Y') | length }}";
        assert_eq!(template(source).render(&user, false).unwrap(), "4");
        for (seconds, format, expected) in [
            (0, "%d %b %Y, %A", "01 Jan 1970, Thursday"),
            (951_782_399, "%Y-%m-%d %H:%M:%S", "2000-02-28 23:59:59"),
            (951_782_400, "%F %-d %B %a", "2000-02-29 29 February Tue"),
            (1_772_323_200, "%-m/%-d/%y %I %p %%", "3/1/26 12 AM %"),
        ] {
            assert_eq!(strftime(format, seconds).unwrap(), expected);
        }
        let error = template("{{ strftime_now('%Q') }}").render(&user, false);
        assert!(error.unwrap_err().to_string().contains("%Q"));
    }

    #[test]
    fn what_cannot_be_rendered_is_an_error() {
        let user = [Message::new("user", "a")];
        let unknown = [Message::new("usr", "a"), Message::new("assistant", "b")];
        for error in [
            template(CHATML).conversation(&unknown).err(),
            template(CHATML).render(&unknown, false).err(),
        ] {
            let error = error.unwrap().to_string();
            let says = "`messages[0]`: `role` is \"usr\", but must be system, developer, user,";
            assert!(error.starts_with(says), "{error}");
        }
        // A role of the template.
        let own = format!("{{# 'usr' #}}{CHATML}");
        template(&own).conversation(&unknown).unwrap();
        let error = template(CHATML).conversation(&user).unwrap_err();
        assert!(error.to_string().contains("`assistant`"), "{error}");
        let refuses = template("{{ raise_exception('no ' + bos_token) }}");
        let error = refuses.render(&user, false).unwrap_err();
        assert!(error.to_string().contains("no <s>"), "{error}");
        // A template that states the number of messages at the beginning.
        let counts =
            template("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}");
        let both = [Message::new("user", "a"), Message::new("assistant", "b")];
        let error = counts.conversation(&both).unwrap_err();
        assert!(error.to_string().contains("message 1"), "{error}");
        let error = ChatTemplate::new("{% if %}".into(), String::new(), String::new());
        assert!(error.unwrap_err().to_string().contains("malformed"));
    }
}
