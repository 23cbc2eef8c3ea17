/* Ends the process at the second Ctrl-C, whatever Python is doing.
 *
 * Python's own handler only notes a signal; the interpreter answers between two instructions. A native call that does
 * not return, or holds the interpreter's lock, would keep the process alive. This handler runs in the signal itself,
 * and calls async-signal-safe functions alone. A plain shared library, loaded by ctypes: no headers of Python.
 */

#include <signal.h>
#include <string.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

static struct sigaction next; /* Python's handler */
static struct termios modes;  /* of the terminal, when the process began */
static int terminal = -1;
static int exit_code;
static double merged; /* seconds in which two signals are one: `timeout` and wrappers send it twice */
static volatile sig_atomic_t is_first = 1;
static volatile double first_at;

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void leave(void)
{
    static const char shown[] = "\x1b[0m\x1b[?25h\x1b[J\n"; /* cursor, and nothing below it */

    if (terminal >= 0) {
        signal(SIGTTOU, SIG_IGN); /* or a process in the background would be stopped here */
        tcsetattr(terminal, TCSANOW, &modes);
    }
    if (isatty(2) && write(2, shown, sizeof shown - 1) < 0)
        _exit(exit_code);
    _exit(exit_code);
}

static void handle(int number)
{
    if (!is_first && now() - first_at > merged)
        leave();
    if (is_first)
        first_at = now();
    is_first = 0;
    next.sa_handler(number);
}

/* Take SIGINT from Python's handler, which must be installed. Returns 0, or -1 where there is no plain handler. */
int interrupt_listen(int code, double merged_seconds)
{
    struct sigaction action;
    int fd;

    if (sigaction(SIGINT, NULL, &action) != 0 || action.sa_flags & SA_SIGINFO)
        return -1;
    if (action.sa_handler == handle)
        return 0;
    if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)
        return -1;
    next = action;
    exit_code = code;
    merged = merged_seconds;
    for (fd = 0; fd <= 2 && terminal < 0; fd++)
        if (tcgetattr(fd, &modes) == 0)
            terminal = fd;
    is_first = 1;
    memset(&action, 0, sizeof action);
    action.sa_handler = handle;
    action.sa_flags = next.sa_flags;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGINT, &action, NULL);
}

/* Count the next signal as the first one: what the last one asked for is done. */
void interrupt_answered(void)
{
    is_first = 1;
}
