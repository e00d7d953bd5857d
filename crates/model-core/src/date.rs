//! [`Date`]: days of the Gregorian calendar, as chat templates and servers write them.

/// A day of the Gregorian calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Date {
    /// The year.
    pub year: u64,
    /// The month, from 1.
    pub month: u64,
    /// The day of the month, from 1.
    pub day: u64,
}

impl Date {
    /// The date so many days after 1970-01-01, in the Gregorian calendar, by counting eras of 400
    /// years that begin with March.
    pub fn of_days(days: u64) -> Self {
        let days = days + 719_468; // since 0000-03-01
        let (era, of_era) = (days / 146_097, days % 146_097);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let day = of_year - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 {
            from_march + 3
        } else {
            from_march - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        Self { year, month, day }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (days, year, month, day) in [(0, 1970, 1, 1), (365, 1971, 1, 1), (11_016, 2000, 2, 29)]
        {
            assert_eq!(Date::of_days(days), Date { year, month, day });
        }
    }
}
