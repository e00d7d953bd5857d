//! GBNF, the notation of llama.cpp's grammars, in the Lark syntax of `llguidance`.
//!
//! Invariant: both allow the same texts, but for one thing: where rules refer to each other in a
//! circle, the longest of several pieces that begin alike is taken. What does not refer to itself
//! is one regular expression, without that difference. Knows no tokenizer.

use std::collections::HashMap;
use std::fmt::Write;

/// The most rules of a grammar.
pub(crate) const MAX_RULES: usize = 1024;
/// The most brackets in each other.
pub(crate) const MAX_NESTING: usize = 100;
/// The most repetitions that can be asked for by number, as in llama.cpp.
const MAX_REPETITIONS: u32 = 2000;

/// True if the text has a rule of GBNF.
pub(crate) fn is_gbnf(grammar: &str) -> bool {
    grammar.contains("::=")
}

/// A text as a literal of Lark.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The grammar in Lark, with the rule `root` as `start`.
///
/// # Errors
/// The fault, with line and column.
pub(crate) fn to_lark(grammar: &str) -> Result<String, String> {
    let mut parser = Parser {
        text: grammar,
        at: 0,
        names: HashMap::new(),
        rules: Vec::new(),
    };
    parser.rules()?;
    let Some(&root) = parser.names.get("root") else {
        return Err("there is no rule 'root', with which texts begin".to_owned());
    };
    let mut bodies = Vec::with_capacity(parser.rules.len());
    for rule in &parser.rules {
        match &rule.body {
            Some(body) => bodies.push(body),
            None => {
                let name = &rule.name;
                return Err(parser.wrong_at(rule.first_use, &format!("no rule is called '{name}'")));
            }
        }
    }
    Ok(Writer::new(&bodies).write(root))
}

/// A piece of a rule.
#[derive(Debug)]
enum Node {
    Literal(String),
    /// A regular expression of one character.
    Class(String),
    Rule(usize),
    /// A token, as Lark writes it.
    Token(String),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat {
        node: Box<Node>,
        min: u32,
        max: Option<u32>,
    },
}

#[derive(Debug)]
struct Rule {
    name: String,
    /// Bytes before the first place that names it.
    first_use: usize,
    body: Option<Node>,
}

struct Parser<'t> {
    text: &'t str,
    at: usize,
    names: HashMap<String, usize>,
    rules: Vec<Rule>,
}

/// The lines that white space may span.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lines {
    One,
    Several,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at..)?.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn takes(&mut self, text: &str) -> bool {
        let is_here = self
            .text
            .get(self.at..)
            .is_some_and(|rest| rest.starts_with(text));
        if is_here {
            self.at += text.len();
        }
        is_here
    }

    fn wrong(&self, what: &str) -> String {
        self.wrong_at(self.at, what)
    }

    fn wrong_at(&self, at: usize, what: &str) -> String {
        let before = self.text.get(..at).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        format!("line {line}, column {column}: {what}")
    }

    /// Passes white space and remarks.
    fn space(&mut self, lines: Lines) {
        while let Some(c) = self.peek() {
            let is_break = matches!(c, '\r' | '\n');
            if c == '#' {
                while self.peek().is_some_and(|c| !matches!(c, '\r' | '\n')) {
                    self.next();
                }
            } else if matches!(c, ' ' | '\t') || (is_break && lines == Lines::Several) {
                self.next();
            } else {
                break;
            }
        }
    }

    fn rules(&mut self) -> Result<(), String> {
        self.space(Lines::Several);
        while self.peek().is_some() {
            let rule = self.name()?;
            self.space(Lines::One);
            if !self.takes("::=") {
                return Err(self.wrong("'::=' is missing after the name of a rule"));
            }
            self.space(Lines::Several);
            let body = self.choice(0)?;
            if let Some(rule) = self.rules.get_mut(rule) {
                rule.body = Some(body);
            }
            match self.peek() {
                None | Some('\r' | '\n') => self.space(Lines::Several),
                Some(c) => return Err(self.wrong(&format!("{c:?} is not expected here"))),
            }
        }
        Ok(())
    }

    /// A name, as the number of its rule.
    fn name(&mut self) -> Result<usize, String> {
        let first_use = self.at;
        while self.peek().is_some_and(is_word) {
            self.next();
        }
        let name = self.text.get(first_use..self.at).unwrap_or_default();
        if name.is_empty() {
            return Err(self.wrong("the name of a rule is missing"));
        }
        if let Some(&number) = self.names.get(name) {
            return Ok(number);
        }
        let number = self.rules.len();
        if number == MAX_RULES {
            return Err(self.wrong(&format!("there are more than {MAX_RULES} rules")));
        }
        self.names.insert(name.to_owned(), number);
        self.rules.push(Rule {
            name: name.to_owned(),
            first_use,
            body: None,
        });
        Ok(number)
    }

    fn choice(&mut self, depth: usize) -> Result<Node, String> {
        if depth > MAX_NESTING {
            return Err(self.wrong(&format!(
                "more than {MAX_NESTING} brackets are in each other"
            )));
        }
        let mut alternatives = vec![self.sequence(depth)?];
        while self.takes("|") {
            self.space(Lines::Several);
            alternatives.push(self.sequence(depth)?);
        }
        Ok(match alternatives.len() {
            1 => alternatives.remove(0),
            _ => Node::Choice(alternatives),
        })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, String> {
        let lines = match depth {
            0 => Lines::One,
            _ => Lines::Several,
        };
        let mut nodes: Vec<Node> = Vec::new();
        while let Some(c) = self.peek() {
            let start = self.at;
            match c {
                '"' => nodes.push(self.literal()?),
                '[' => nodes.push(self.class()?),
                '.' => {
                    self.next();
                    nodes.push(Node::Class(r"(.|\n)".to_owned()));
                }
                '(' => {
                    self.next();
                    self.space(Lines::Several);
                    nodes.push(self.choice(depth + 1)?);
                    if !self.takes(")") {
                        return Err(self.wrong_at(start, "this '(' is not closed"));
                    }
                }
                '<' | '!' => nodes.push(self.token()?),
                '*' | '+' | '?' | '{' => {
                    let (min, max) = self.repetitions()?;
                    let Some(node) = nodes.pop() else {
                        return Err(self.wrong_at(start, &format!("nothing is before '{c}'")));
                    };
                    let node = Box::new(node);
                    nodes.push(Node::Repeat { node, min, max });
                }
                c if is_word(c) => nodes.push(Node::Rule(self.name()?)),
                _ => break,
            }
            self.space(lines);
        }
        Ok(match nodes.len() {
            1 => nodes.remove(0),
            _ => Node::Sequence(nodes),
        })
    }

    fn literal(&mut self) -> Result<Node, String> {
        let start = self.at;
        self.next();
        let mut text = String::new();
        loop {
            match self.peek() {
                None => return Err(self.wrong_at(start, "this '\"' is not closed")),
                Some('"') => break,
                Some(_) => text.push(self.character()?),
            }
        }
        self.next();
        Ok(Node::Literal(text))
    }

    /// A character, or the escape of one.
    fn character(&mut self) -> Result<char, String> {
        let start = self.at;
        let ended = |parser: &Self| parser.wrong("a character is missing");
        let c = self.next().ok_or_else(|| ended(self))?;
        if c != '\\' {
            return Ok(c);
        }
        let n_digits = match self.next().ok_or_else(|| ended(self))? {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            'n' => return Ok('\n'),
            c @ ('\\' | '"' | '[' | ']') => return Ok(c),
            c => return Err(self.wrong_at(start, &format!("'\\{c}' is no escape"))),
        };
        let digits = self.text.get(self.at..self.at + n_digits);
        let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let Some(c) = code.and_then(char::from_u32) else {
            let what = format!("an escape needs {n_digits} hexadecimal digits of a character");
            return Err(self.wrong_at(start, &what));
        };
        self.at += n_digits;
        Ok(c)
    }

    /// A class of characters, as a regular expression.
    fn class(&mut self) -> Result<Node, String> {
        let start = self.at;
        self.next();
        let mut class = if self.takes("^") { "[^" } else { "[" }.to_owned();
        let n_mark = class.len();
        while self.peek() != Some(']') {
            if self.peek().is_none() {
                return Err(self.wrong_at(start, "this '[' is not closed"));
            }
            let at = self.at;
            let first = self.character()?;
            let rest = self.text.get(self.at..).unwrap_or_default();
            let mut last = first;
            if rest.starts_with('-') && !rest.starts_with("-]") {
                self.next();
                last = self.character()?;
            }
            if last < first {
                return Err(self.wrong_at(at, "the range ends before it begins"));
            }
            // Cannot fail: it writes to a string.
            let _ = write!(class, r"\x{{{:X}}}", u32::from(first));
            if last != first {
                let _ = write!(class, r"-\x{{{:X}}}", u32::from(last));
            }
        }
        if class.len() == n_mark {
            return Err(self.wrong_at(start, "the class has no characters"));
        }
        self.next();
        class.push(']');
        Ok(Node::Class(class))
    }

    /// A token by its text or its id, or any but one by its id.
    fn token(&mut self) -> Result<Node, String> {
        let start = self.at;
        let is_negated = self.takes("!");
        let rest = self.text.get(self.at..).unwrap_or_default();
        let token = rest.split_once('>').map(|(token, _)| token);
        let Some(token) = token.filter(|t| t.starts_with('<') && !t.contains([' ', '\n'])) else {
            return Err(self.wrong_at(start, "a token is written as <text> or <[id]>"));
        };
        self.at += token.len() + 1;
        let id = token.strip_prefix("<[").and_then(|id| id.strip_suffix(']'));
        match id.map(str::parse::<u32>) {
            Some(Ok(id)) if is_negated => Ok(Node::Token(format!("<[^{id}]>"))),
            Some(Ok(id)) => Ok(Node::Token(format!("<[{id}]>"))),
            Some(Err(_)) => Err(self.wrong_at(start, "the id of a token is a number")),
            None if is_negated => {
                Err(self.wrong_at(start, "a token that is not wanted is written as !<[id]>"))
            }
            None => Ok(Node::Token(format!("{token}>"))),
        }
    }

    /// The least and the most repetitions.
    fn repetitions(&mut self) -> Result<(u32, Option<u32>), String> {
        let start = self.at;
        match self.next() {
            Some('*') => return Ok((0, None)),
            Some('+') => return Ok((1, None)),
            Some('?') => return Ok((0, Some(1))),
            _ => {}
        }
        let rest = self.text.get(self.at..).unwrap_or_default();
        let wrong = || self.wrong_at(start, "repetitions are {n}, {n,}, {,m} or {n,m}");
        let (numbers, _) = rest.split_once('}').ok_or_else(wrong)?;
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        let (min, max) = match numbers.split_once(',') {
            None => (number(numbers)?, Some(number(numbers)?)),
            Some((min, max)) => {
                let min = if min.trim().is_empty() {
                    0
                } else {
                    number(min)?
                };
                let max = if max.trim().is_empty() {
                    None
                } else {
                    Some(number(max)?)
                };
                (min, max)
            }
        };
        let most = min.max(max.unwrap_or(0));
        if most > MAX_REPETITIONS {
            let what = format!("{most} repetitions: {MAX_REPETITIONS} can be asked for at most");
            return Err(self.wrong_at(start, &what));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.wrong_at(start, "the most repetitions are less than the least"));
        }
        self.at += numbers.len() + 1;
        Ok((min, max))
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_')
}

/// Writes Lark. A piece that refers to nothing that refers to itself is a terminal.
struct Writer<'n> {
    bodies: &'n [&'n Node],
    /// For each rule, true if it is a terminal.
    terminals: Vec<bool>,
    lark: String,
    n_pieces: usize,
}

impl<'n> Writer<'n> {
    fn new(bodies: &'n [&'n Node]) -> Self {
        let mut terminals = vec![false; bodies.len()];
        loop {
            let mut is_changed = false;
            for (at, body) in bodies.iter().enumerate() {
                let is_terminal = is_terminal(body, &terminals);
                if let Some(known) = terminals.get_mut(at).filter(|known| **known != is_terminal) {
                    *known = is_terminal;
                    is_changed = true;
                }
            }
            if !is_changed {
                break;
            }
        }
        Self {
            bodies,
            terminals,
            lark: String::new(),
            n_pieces: 0,
        }
    }

    fn write(mut self, root: usize) -> String {
        let start = self.name(root);
        let _ = writeln!(self.lark, "start: {start}");
        let bodies = self.bodies;
        for (at, body) in bodies.iter().enumerate() {
            let name = self.name(at);
            let text = match self.terminals.get(at) {
                Some(true) => self.terminal(body),
                _ => self.rule(body),
            };
            let _ = writeln!(self.lark, "{name}: {text}");
        }
        self.lark
    }

    /// A rule's name: those of terminals are in upper case.
    fn name(&self, rule: usize) -> String {
        match self.terminals.get(rule) {
            Some(true) => format!("R{rule}"),
            _ => format!("r{rule}"),
        }
    }

    fn terminal(&mut self, node: &Node) -> String {
        let text = match node {
            Node::Literal(text) => quoted(text),
            Node::Class(class) => format!("/{class}/"),
            Node::Rule(rule) => self.name(*rule),
            Node::Token(token) => token.clone(),
            Node::Sequence(nodes) if nodes.is_empty() => quoted(""),
            Node::Sequence(nodes) => self.joined(nodes, " "),
            Node::Choice(nodes) => self.joined(nodes, " | "),
            Node::Repeat { node, min, max } => repeated(&self.terminal(node), *min, *max),
        };
        if is_deep(node) {
            self.named('P', &text)
        } else {
            text
        }
    }

    fn joined(&mut self, nodes: &[Node], between: &str) -> String {
        let texts: Vec<String> = nodes.iter().map(|node| self.terminal(node)).collect();
        format!("({})", texts.join(between))
    }

    fn rule(&mut self, node: &Node) -> String {
        let text = match node {
            Node::Literal(text) => return quoted(text),
            Node::Token(_) | Node::Rule(_) => return self.terminal(node),
            _ if is_terminal(node, &self.terminals) => {
                return self.piece(std::slice::from_ref(node));
            }
            Node::Class(_) => return self.terminal(node),
            Node::Sequence(nodes) => {
                let terminals = self.terminals.clone();
                let together =
                    nodes.chunk_by(|a, b| is_terminal(a, &terminals) && is_terminal(b, &terminals));
                let texts: Vec<String> = together
                    .map(|nodes| match nodes {
                        [one] => self.rule(one),
                        several => self.piece(several),
                    })
                    .collect();
                format!("({})", texts.join(" "))
            }
            Node::Choice(nodes) => {
                let texts: Vec<String> = nodes.iter().map(|node| self.rule(node)).collect();
                format!("({})", texts.join(" | "))
            }
            Node::Repeat { node, min, max } => repeated(&self.rule(node), *min, *max),
        };
        if is_deep(node) {
            self.named('p', &text)
        } else {
            text
        }
    }

    /// A terminal of its own for pieces that follow each other.
    fn piece(&mut self, nodes: &[Node]) -> String {
        let text = self.joined(nodes, " ");
        self.named('P', &text)
    }

    /// A terminal (`P`) or a rule (`p`) of its own for a text.
    fn named(&mut self, kind: char, text: &str) -> String {
        let name = format!("{kind}{}", self.n_pieces);
        self.n_pieces += 1;
        let _ = writeln!(self.lark, "{name}: {text}");
        name
    }
}

fn repeated(text: &str, min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => format!("({text})*"),
        (1, None) => format!("({text})+"),
        (0, Some(1)) => format!("({text})?"),
        (min, None) => format!("({text}){{{min},}}"),
        (_, Some(0)) => quoted(""),
        (min, Some(max)) => format!("({text}){{{min},{max}}}"),
    }
}

/// Brackets that are in each other in Lark: `llguidance` reads no more than 30.
const MAX_BRACKETS: usize = 12;

/// True if a piece gets a name, so that what is around it has few brackets.
fn is_deep(node: &Node) -> bool {
    let depth = depth(node);
    depth > 0 && depth.is_multiple_of(MAX_BRACKETS)
}

/// The brackets that are in each other in a piece.
fn depth(node: &Node) -> usize {
    match node {
        Node::Literal(_) | Node::Class(_) | Node::Rule(_) | Node::Token(_) => 0,
        Node::Sequence(nodes) | Node::Choice(nodes) => {
            1 + nodes.iter().map(depth).max().unwrap_or(0)
        }
        Node::Repeat { node, .. } => 1 + depth(node),
    }
}

/// True if the piece has no token, and nothing but terminals.
fn is_terminal(node: &Node, terminals: &[bool]) -> bool {
    match node {
        Node::Literal(_) | Node::Class(_) => true,
        Node::Rule(rule) => terminals.get(*rule) == Some(&true),
        Node::Token(_) => false,
        Node::Sequence(nodes) | Node::Choice(nodes) => {
            nodes.iter().all(|node| is_terminal(node, terminals))
        }
        Node::Repeat { node, .. } => is_terminal(node, terminals),
    }
}
