//! What templates may call: Python's methods, `raise_exception`, and a clock that the caller winds.

use std::error::Error as _;
use std::fmt;

use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// A method of Python's strings, lists and dicts.
pub(super) fn python_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    pycompat::unknown_method_callback(state, value, method, args)
}

/// The test `iterable`, which Python's none and numbers do not pass.
pub(super) fn is_iterable(value: Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Ends the rendering with the template's own words.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
}

/// The words of a template that refuses its messages.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl Raised {
    /// Finds the words in an error, which may be wrapped by the blocks it went through.
    pub(super) fn find(error: &Error) -> Option<&Raised> {
        let mut source = error.source();
        while let Some(inner) = source {
            if let Some(raised) = inner.downcast_ref::<Raised>() {
                return Some(raised);
            }
            source = inner.source();
        }
        None
    }
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// `strftime_now(format)` at a fixed time.
pub(super) fn strftime_now(now: i64) -> Value {
    Value::from_function(move |format: String| DateTime::from_unix(now).format(&format))
}

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

const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

const DAY_SECONDS: i64 = 24 * 60 * 60;

/// A time in the Gregorian calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DateTime {
    year: i64,
    /// 1 to 12.
    month: i64,
    /// 1 to 31.
    day: i64,
    /// 0 is Sunday.
    weekday: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 to 86399.
    second: i64,
}

impl DateTime {
    /// The time so many seconds after 1970 began.
    fn from_unix(seconds: i64) -> Self {
        let days = seconds.div_euclid(DAY_SECONDS);
        // Years are counted from March here, so that the day that leap years add is the last; eras
        // are the 400 years (146,097 days) after which the calendar repeats. 719,468 days lie
        // between 1 March of year 0 and 1970.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let before_march = 59 + i64::from(is_leap);
        let day_of_year =
            if month <= 2 { day_from_march - 305 } else { day_from_march + before_march + 1 };
        DateTime {
            year,
            month,
            day: day_from_march - (153 * month_from_march + 2) / 5 + 1,
            weekday: (days + 4).rem_euclid(7),
            day_of_year,
            second: seconds.rem_euclid(DAY_SECONDS),
        }
    }

    /// Formats as C's `strftime` does in the C locale; an unknown directive is an error.
    fn format(&self, format: &str) -> Result<String, Error> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            // `%-d` leaves the padding out.
            let padded = directive != Some('-');
            if !padded {
                directive = chars.next();
            }
            let text = directive.and_then(|d| self.directive(d)).ok_or_else(|| {
                let asked = directive.map(String::from).unwrap_or_default();
                Error::new(ErrorKind::InvalidOperation, format!("strftime_now: %{asked}"))
            })?;
            let text = if padded { &text } else { text.trim_start_matches(['0', ' ']) };
            out.push_str(if text.is_empty() { "0" } else { text });
        }
        Ok(out)
    }

    fn directive(&self, directive: char) -> Option<String> {
        let (hour, minute, second) = (self.second / 3600, self.second / 60 % 60, self.second % 60);
        let hour_of_half = (hour + 11) % 12 + 1;
        let month = MONTHS[self.month as usize - 1];
        let weekday = WEEKDAYS[self.weekday as usize];
        Some(match directive {
            '%' => "%".to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour_of_half:02}"),
            'j' => format!("{:03}", self.day_of_year),
            'M' => format!("{minute:02}"),
            'm' => format!("{:02}", self.month),
            'n' => "\n".to_owned(),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'S' => format!("{second:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            't' => "\t".to_owned(),
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(seconds: i64, format: &str, expect: &str) {
        assert_eq!(DateTime::from_unix(seconds).format(format).unwrap(), expect);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        check(0, "%A %Y-%m-%d %H:%M:%S %j", "Thursday 1970-01-01 00:00:00 001");
        check(951_782_400, "%F %a %j", "2000-02-29 Tue 060");
        check(951_868_800, "%F %j", "2000-03-01 061");
        check(1_721_994_300, "%d %b %Y, %I:%M %p", "26 Jul 2024, 11:45 AM");
        check(1_735_689_599, "%B %e, %y %T %j", "December 31, 24 23:59:59 366");
        check(-1, "%Y-%m-%d %H", "1969-12-31 23");
        check(1_704_067_200, "%-d/%-m %-H%%", "1/1 0%");
    }

    #[test]
    fn far_times_do_not_overflow_and_unknown_directives_are_errors() {
        for seconds in [i64::MIN, i64::MAX] {
            assert!(DateTime::from_unix(seconds).format("%F %T").is_ok());
        }
        assert!(DateTime::from_unix(0).format("%Q").is_err());
        assert!(DateTime::from_unix(0).format("%").is_err());
    }
}
