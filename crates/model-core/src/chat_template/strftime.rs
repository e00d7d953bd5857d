//! [`strftime`]: dates for `strftime_now`, in UTC and in English, as C's `strftime` writes them.
//!
//! Knows nothing of templates but their errors.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

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

/// `time` in UTC by the rules of C's `strftime`, in English.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, Error> {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let name = |names: &[&'static str], index: u64| {
        usize::try_from(index)
            .ok()
            .and_then(|i| names.get(i).copied())
            .unwrap_or_default()
    };
    let (month_name, day_name) = (name(&MONTHS, month - 1), name(&DAYS, days % 7));
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let field = match chars.next() {
            Some('Y') => format!("{year:04}"),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name.chars().take(3).collect(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name.chars().take(3).collect(),
            Some('H') => format!("{:02}", second / 3600),
            Some('I') => format!("{:02}", (second / 3600 + 11) % 12 + 1),
            Some('p') => if second < 43_200 { "AM" } else { "PM" }.to_owned(),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('F') => format!("{year:04}-{month:02}-{day:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let what = other.map_or_else(String::new, String::from);
                let message = format!("strftime_now does not know %{what}");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        out.push_str(&field);
    }
    Ok(out)
}

/// Year, month from 1 and day from 1 of the day `days` after 1970-01-01 in the Gregorian calendar,
/// counted in eras of 400 years that start in March.
pub(super) fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}
