//! [`strftime`]: dates for `strftime_now`, in UTC and in English, as C's `strftime` writes them.
//!
//! Knows nothing of templates.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::date;

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

/// Of a year that is no leap year.
const MONTH_DAYS: [u64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// `time` in UTC by the rules of C's `strftime`, in English. What it does not know stays.
pub(super) fn strftime(format: &str, time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = Date::of(since.as_secs());
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let mut chars = from.chars();
        chars.next();
        let mut letter = chars.next();
        let flag = letter.filter(|c| matches!(c, '-' | '_' | '0' | '^' | '#'));
        if flag.is_some() {
            letter = chars.next();
        }
        let known = letter.and_then(|letter| match letter {
            'f' => Some(format!("{:06}", since.subsec_micros())),
            _ => now.field(letter),
        });
        match known {
            Some(field) => out.push_str(&flagged(field, flag)),
            None => out.push_str(from.strip_suffix(chars.as_str()).unwrap_or(from)),
        }
        rest = chars.as_str();
    }
    out.push_str(rest);
    out
}

/// The field as a flag wants it: without zeros before it, or with spaces for them.
fn flagged(field: String, flag: Option<char>) -> String {
    let digits = field.trim_start_matches(['0', ' ']);
    let is_number = field.trim_start().bytes().all(|b| b.is_ascii_digit());
    match flag {
        Some('-') if is_number && digits.is_empty() => "0".to_owned(),
        Some('-') if is_number => digits.to_owned(),
        Some('_') if is_number && field.len() > 1 => {
            let digits = if digits.is_empty() { "0" } else { digits };
            format!("{digits:>width$}", width = field.len())
        }
        Some('0') if is_number => field.replace(' ', "0"),
        Some('^') => field.to_uppercase(),
        _ => field,
    }
}

/// A second in UTC.
struct Date {
    year: u64,
    month: u64,
    day: u64,
    /// Days since Sunday.
    weekday: u64,
    /// Days since January 1.
    year_day: u64,
    /// Seconds since midnight.
    second: u64,
    /// Seconds since 1970.
    stamp: u64,
}

impl Date {
    fn of(stamp: u64) -> Self {
        let days = stamp / 86_400;
        let date::Date { year, month, day } = date::Date::of_days(days);
        let before = MONTH_DAYS
            .iter()
            .take(usize::try_from(month - 1).unwrap_or(0));
        let leap_day = u64::from(month > 2 && is_leap(year));
        Self {
            year,
            month,
            day,
            weekday: (days + 4) % 7,
            year_day: before.sum::<u64>() + leap_day + day - 1,
            second: stamp % 86_400,
            stamp,
        }
    }

    /// The year and the week in it, from Monday on, of which the first has a Thursday.
    fn iso_week(&self) -> (u64, u64) {
        let monday_based = (self.weekday + 6) % 7;
        // The Thursday of the same week decides.
        let thursday = self.year_day + 3;
        match thursday.checked_sub(monday_based) {
            None => {
                let days = if is_leap(self.year - 1) { 366 } else { 365 };
                (self.year - 1, (days + thursday - monday_based) / 7 + 1)
            }
            Some(day) if day >= 365 + u64::from(is_leap(self.year)) => (self.year + 1, 1),
            Some(day) => (self.year, day / 7 + 1),
        }
    }

    /// The text that a letter stands for.
    fn field(&self, letter: char) -> Option<String> {
        let name = |names: &[&'static str], index: u64| {
            let index = usize::try_from(index).ok();
            index
                .and_then(|i| names.get(i).copied())
                .unwrap_or_default()
        };
        let (month, day) = (name(&MONTHS, self.month - 1), name(&DAYS, self.weekday));
        let short = |name: &str| name.chars().take(3).collect::<String>();
        let (hour, minute, second) = (self.second / 3600, self.second / 60 % 60, self.second % 60);
        let hour_12 = (hour + 11) % 12 + 1;
        let all = |letters: &[char], separator: &str| {
            let fields = letters.iter().map(|&letter| self.field(letter));
            fields
                .collect::<Option<Vec<_>>>()
                .map(|all| all.join(separator))
        };
        Some(match letter {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'C' => format!("{:02}", self.year / 100),
            'G' => self.iso_week().0.to_string(),
            'g' => format!("{:02}", self.iso_week().0 % 100),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.year_day + 1),
            'U' => format!("{:02}", (self.year_day + 7 - self.weekday) / 7),
            'W' => format!("{:02}", (self.year_day + 7 - (self.weekday + 6) % 7) / 7),
            'V' => format!("{:02}", self.iso_week().1),
            'w' => self.weekday.to_string(),
            'u' => ((self.weekday + 6) % 7 + 1).to_string(),
            'B' => month.to_owned(),
            'b' | 'h' => short(month),
            'A' => day.to_owned(),
            'a' => short(day),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour_12:02}"),
            'k' => format!("{hour:2}"),
            'l' => format!("{hour_12:2}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'P' => if hour < 12 { "am" } else { "pm" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            's' => self.stamp.to_string(),
            'F' => all(&['Y', 'm', 'd'], "-")?,
            'D' | 'x' => all(&['m', 'd', 'y'], "/")?,
            'T' | 'X' => all(&['H', 'M', 'S'], ":")?,
            'R' => all(&['H', 'M'], ":")?,
            'r' => all(&['I', 'M', 'S'], ":")? + " " + &self.field('p')?,
            'c' => all(&['a', 'b', 'e', 'T', 'Y'], " ")?,
            // Python's times of day have no zone unless they are given one: nor has this.
            'Z' | 'z' => String::new(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}
